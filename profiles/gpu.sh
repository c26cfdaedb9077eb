#!/usr/bin/env bash
# One command for a GPU machine that has torch and triton: runs what only a GPU can show, the most
# valuable part first, and leaves at most eight small files.
#
#   profiles/gpu.sh [--dry] [--budget SECONDS] [--only PART,...] [FOLDER]
#
# Parts, each of which survives the failure of those before it:
#   launch     a straight-line graph of 1,000, 100, 10 and 1 nodes: host and device time
#   paths      capture every attention path; replay emits the tokens of the eager step
#   options    capture every option: drafts of each kind, DCP, FP8, slot tensors; bit for bit eager
#   tests      pytest -m gpu
#   attention  decode attention, ours and every importable peer's, each checked, then timed
#   memory     small attention under compute-sanitizer if it is there; hidden entries NaN anyway
#   step       decode steps of 8 layers of an 8B model, graph beside eager
#   tune       other tiles for this GPU, as a copy of kernels/tiles.py
#   traces     decode steps under torch.profiler, and under nsys if it is there
# Files: summary.txt; checks.txt and numbers.txt, what parts print; records.jsonl; tiles.py;
# trace.json.gz; nsys.txt. With --only they are added to, else begun anew.
# --dry runs the same parts on a CPU at small sizes. The exit code is 0 when every part passed.
set -uo pipefail
cd "$(dirname "$0")/.."

all=launch,paths,options,tests,attention,memory,step,tune,traces
dry=() budget=540 only=$all out=profiles/results/gpu
while (($#)); do
  case $1 in
    --dry) dry=(--dry) ;;
    --budget) budget=$2 && shift ;;
    --only) only=$2 && shift ;;
    -*) sed -n '2,22p' "$0" && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
for name in ${only//,/ }; do
  [[ ,$all, == *",$name,"* ]] || { echo "--only: wanted some of $all, got $name" && exit 2; }
done
mkdir -p "$out" && out=$(cd "$out" && pwd)
[[ $only != "$all" ]] ||
  rm -f "$out"/{summary,checks,numbers,nsys}.txt "$out"/{records.jsonl,tiles.py,trace.json.gz}
deadline=$((SECONDS + budget))
failed=0

python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

say() { echo "$*" | tee -a "$out/summary.txt"; }

# part NAME LIMIT FILE COMMAND...: at most LIMIT seconds and what is left of the budget
part() {
  local name=$1 limit=$2 file=$3 left=$((deadline - SECONDS)) started=$SECONDS code
  shift 3
  [[ ,$only, == *",$name,"* ]] || return
  ((${#dry[@]} == 0)) || limit=$budget  # a CPU shows that it works, in whatever time
  if ((left < 10)); then
    say "$name: skipped, the budget is spent" && failed=1 && return
  fi
  echo "== $name" >>"$out/$file.txt"
  timeout --kill-after 10 "$((left < limit ? left : limit))" "$@" 2>&1 | tail -c 150000 >>"$out/$file.txt"
  code=${PIPESTATUS[0]}
  case $code in
    0) say "$name: passed in $((SECONDS - started)) s" ;;
    124 | 137) say "$name: stopped after $((SECONDS - started)) s, see $file.txt" && failed=1 ;;
    *) say "$name: failed with $code in $((SECONDS - started)) s, see $file.txt" && failed=1 ;;
  esac
}

measure() {
  part "$1" "$2" "$3" "${@:4}" "$python" -m profiles.gpu "$1" "${dry[@]}" --out "$out/records.jsonl"
}

if ! missing=$("$python" -c 'import torch, triton, numpy' 2>&1); then
  say "not ready: $(tail -n 1 <<<"$missing"). Install graphattn's dependencies: pip install -e ."
  exit 2
fi
"$python" -c 'from profiles.record import machine, versions; print(machine()); print(versions())' |
  tee -a "$out/summary.txt"
if ((${#dry[@]} == 0)) && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "not ready: torch sees no CUDA device; --dry runs without one"
  exit 2
fi

sanitizer=()
((${#dry[@]})) || ! command -v compute-sanitizer >/dev/null ||
  sanitizer=(compute-sanitizer --tool memcheck --error-exitcode 99 --target-processes all)

measure launch 60 numbers
measure paths 150 checks
measure options 180 checks
part tests 240 checks "$python" -m pytest -m gpu -q --no-header \
  --continue-on-collection-errors tests
measure attention 150 numbers
measure memory 180 checks "${sanitizer[@]}"
measure step 90 numbers
part tune 240 numbers "$python" -m profiles.tune "${dry[@]}" --seconds 220 --out "$out/tiles.py"
measure traces 60 numbers
if ((${#dry[@]} == 0)) && command -v nsys >/dev/null; then
  part traces 120 nsys profiles/nsys.sh # its own files stay under /tmp
fi
say "$([[ $failed == 0 ]] && echo 'all parts passed' || echo 'not all parts passed')"
exit "$failed"
