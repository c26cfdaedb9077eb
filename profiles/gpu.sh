#!/usr/bin/env bash
# One command for a GPU machine that has torch and triton: runs what only a GPU can show, the most
# valuable part first, and leaves at most eight small files.
#
#   profiles/gpu.sh [--dry] [--budget SECONDS] [FOLDER]
#
# Parts, each of which survives the failure of those before it:
#   paths      capture every attention path; replay emits the tokens of the eager step
#   tests      pytest -m gpu
#   launch     a straight-line graph of 1, 10, 100 and 1,000 nodes: host and device time
#   attention  decode attention beside the bandwidth of a device copy
#   step       decode steps of 8 layers of an 8B model, graph beside eager
# --dry runs the same parts on a CPU at small sizes. The exit code is 0 when every part passed.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=() budget=540 out=profiles/results/gpu
while (($#)); do
  case $1 in
    --dry) dry=(--dry) ;;
    --budget) budget=$2 && shift ;;
    -*) sed -n '2,14p' "$0" && exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
mkdir -p "$out" && out=$(cd "$out" && pwd)
rm -f "$out"/{summary,paths,tests,launch,attention,step}.txt "$out"/records.jsonl
deadline=$((SECONDS + budget))
failed=0

python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

say() { echo "$*" | tee -a "$out/summary.txt"; }

# part NAME LIMIT COMMAND...: at most LIMIT seconds and what is left of the budget
part() {
  local name=$1 limit=$2 left=$((deadline - SECONDS)) started=$SECONDS code
  shift 2
  if ((left < 10)); then
    say "$name: skipped, the budget is spent" && failed=1 && return
  fi
  timeout "$((left < limit ? left : limit))" "$@" >"$out/$name.txt" 2>&1
  code=$?
  tail -c 200000 "$out/$name.txt" >"$out/.tail" && mv "$out/.tail" "$out/$name.txt"
  case $code in
    0) say "$name: passed in $((SECONDS - started)) s" ;;
    124) say "$name: stopped after $((SECONDS - started)) s, see $name.txt" && failed=1 ;;
    *) say "$name: failed with $code in $((SECONDS - started)) s, see $name.txt" && failed=1 ;;
  esac
}

measure() { part "$1" "$2" "$python" -m profiles.gpu "$1" "${dry[@]}" --out "$out/records.jsonl"; }

if ! missing=$("$python" -c 'import torch, triton, numpy, nvtx' 2>&1); then
  say "not ready: $(tail -n 1 <<<"$missing"). Install graphattn's dependencies: pip install -e ."
  exit 2
fi
"$python" -c 'from profiles.record import machine, versions; print(machine()); print(versions())' |
  tee -a "$out/summary.txt"
if ((${#dry[@]} == 0)) && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "not ready: torch sees no CUDA device; --dry runs without one"
  exit 2
fi

measure paths 180
part tests 240 "$python" -m pytest -m gpu -q --no-header \
  --continue-on-collection-errors tests
measure launch 60
measure attention 120
measure step 120
say "$([[ $failed == 0 ]] && echo 'all parts passed' || echo 'not all parts passed')"
exit "$failed"
