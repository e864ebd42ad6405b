#!/bin/sh
# Tests marked gpu and the benchmark of inference on a CUDA device, in less than 8 minutes.
#
#     sh benchmarks/gpu_check.sh [FOLDER]
#
# Sections that were done are kept if time runs out.
# Writes tests.txt, inference.json, inference.md and inference.png into FOLDER (gpu_check).
# PYTHON names the interpreter of an environment that the package is installed in.
set -u
cd "$(dirname "$0")/.." || exit 2
out=${1:-gpu_check}
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
	echo "torch sees no CUDA device here; nothing was checked." >&2
	exit 3
}
# torch.compile does not see through the checks of types that tests put around functions.
JAXTYPING_DISABLE=1 timeout 170 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider >"$out/tests.txt" 2>&1
tests=$?
tail -n 3 "$out/tests.txt"
timeout 290 "$python" -m benchmarks.inference --accelerator cuda --genes 500 1000 \
	--sections machine step together overhead precision ways batches \
	--out "$out/inference.json" --report "$out/inference.md"
bench=$?
echo "tests: exit $tests, benchmark: exit $bench; reports are in $out/"
[ "$tests" -eq 0 ] && [ "$bench" -eq 0 ]
