#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the CUDA C++ kernels at small sizes: reads and writes out of
# bounds (memcheck), races in shared memory (racecheck). `make sanitize-gpu` runs it.
#
#   PYTHON=path     the interpreter with the tests' packages
#   SANITIZER=path  compute-sanitizer, of a CUDA toolkit
#   TOOLS='...'     which of its tools run
set -u
PYTHON=${PYTHON:-python} SANITIZER=${SANITIZER:-compute-sanitizer} TOOLS=${TOOLS:-memcheck racecheck}
command -v "$SANITIZER" >/dev/null || {
    echo "sanitize-gpu: no $SANITIZER; allowed: one in PATH, or SANITIZER=path of a CUDA toolkit" >&2
    exit 2
}
kernels=tests/targets/cuda/kernels
small='(test_every_kernel_gives_the_same_bits and size4) or (test_swiglu and size3)
    or (test_products_and_their_bits and size4)
    or (test_a_norm_inside and size4) or test_stores_the_new_token or test_short_tables
    or test_is_what_the_triton_kernels_do or test_what_it_leaves or test_route
    or test_an_expert_of_all_tokens_runs_along or (test_few_tokens and size0)
    or test_other_ranks_experts_and_padding or test_products_of_codes or test_codes_of_a_norm
    or (test_every_way and 30-size1) or test_values_of_blocks
    or (test_all_that_route_makes and 5-experts3) or (test_bits_are_those_of_rows and heads0 and bf16-10)'
# Every tensor has memory of its own, so that what lies behind it is nobody's.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in $TOOLS; do
    echo "sanitize-gpu: $tool"
    api= && [ "$tool" = memcheck ] && api='--report-api-errors no'  # torch asks for what is not there
    "$SANITIZER" --tool "$tool" $api --error-exitcode 86 "$PYTHON" -P -m pytest -q -x -m gpu \
        -p no:cacheprovider -k "$(echo "$small" | tr '\n' ' ')" $kernels/test_native_*.py $kernels/test_gem*.py || status=1
done
exit $status
