#!/usr/bin/env bash
# Where a step's time goes on a GPU, recorded by nsys and told by `graphattn profile-report`.
#
#   profiles/nsys.sh [--dry] [--out FOLDER] [COMMAND...]
#
# Records COMMAND, by default some decode steps (python -m profiles.gpu_traces), twice:
#   node   every node of every replay with its times: stages, layers, kernels. Replays are slower.
#   graph  one entry per launch, as fast as without nsys: launches and idle time between replays.
# A graph must be captured while nsys records, or its nodes have no names: so from the start, without
# a capture range. Each recording leaves LEVEL.nsys-rep, LEVEL.sqlite and LEVEL.html in FOLDER, by
# default a new one under /tmp. --dry prints the commands. The exit code is 0 when both reports
# were made, whatever they found.
set -uo pipefail
cd "$(dirname "$0")/.."

dry= out=
while (($#)); do
  case $1 in
    --dry) dry=1 ;;
    --out) out=${2:?--out FOLDER} && shift ;;
    -*) sed -n '2,13p' "$0" && exit 2 ;;
    *) break ;;
  esac
  shift
done
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
(($#)) || set -- "$python" -m profiles.gpu_traces

if [[ ! $dry ]] && ! command -v nsys >/dev/null; then
  echo "nsys is not on PATH: it comes with the CUDA toolkit, or as nsight-systems-cli from NVIDIA."
  echo "Without it: python -m profiles.gpu traces --out FOLDER/records.jsonl records torch.profiler's."
  echo "These would be the commands:"
  dry=absent
fi
[[ $dry ]] && out=${out:-FOLDER}
[[ $out ]] || out=$(mktemp -d /tmp/graphattn-nsys.XXXXXX)
[[ $dry ]] || mkdir -p "$out"

run() {
  echo "+ $*"
  [[ $dry ]] || "$@"
}

failed=0
for level in node graph; do
  file=$out/$level
  run nsys profile --trace=cuda,nvtx --cuda-graph-trace=$level --sample=none --cpuctxsw=none \
    --force-overwrite=true --output="$file" "$@" &&
    run nsys export --type=sqlite --force-overwrite=true --output="$file.sqlite" "$file.nsys-rep"
  if (($?)); then
    echo "$level: nsys failed" && failed=1 && continue
  fi
  run "$python" -m graphattn profile-report "$file.sqlite" --html "$file.html"
  (($? > 1)) && failed=1 # 1: it found something
done
[[ $dry == absent ]] && exit 2
exit "$failed"
