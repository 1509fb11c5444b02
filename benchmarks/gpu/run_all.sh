#!/bin/bash
# Builds with CUDA, tests the device channels on the GPUs of this machine and measures messages;
# needs two GPUs for figures that mean something, one for the tests. Everything that is printed
# is also kept in the folder given as the first argument. Steps can be chosen: run_all.sh DIR
# build tests connections measure sanitize extension python step random beside
set -u
out=${1:?usage: run_all.sh OUTPUT_FOLDER [STEP...]}
shift
steps=${*:-build tests connections measure}
mkdir -p "$out"
cd "$(dirname "$0")/../.." || exit 1
build=build/gpu
programs=$build/tests/cpp/gpu
# The library that torch would load.
export RRFP_TEST_NCCL=${RRFP_TEST_NCCL:-$(python3 -c 'import importlib.util as u
for root in u.find_spec("nvidia").submodule_search_locations:
    print(root + "/nccl/lib/libnccl.so.2")' | head -1)}
failed=0

step() {  # step NAME LIMIT_S COMMAND...
  local name=$1 limit_s=$2
  shift 2
  local begin=$SECONDS
  timeout "$limit_s" "$@" 2>&1 | tee "$out/$name.log" | sed 's/^/  /'
  local status=${PIPESTATUS[0]}
  echo "== $name: status $status, $((SECONDS - begin)) s"
  [ "$status" -eq 0 ] || failed=$((failed + 1))
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/gpus.log"
echo "NCCL library: $RRFP_TEST_NCCL"
for what in $steps; do
  case $what in
    build)
      step configure 60 cmake -G Ninja -S . -B $build -DRRFP_BUILD_PYTHON=OFF \
        -DRRFP_BUILD_TESTS=ON -DRRFP_CUDA=on
      step build 180 ninja -C $build device_transport_test device_failure_test \
        ipc_transport_test device_memory_test gpu_messages
      ;;
    tests)
      step device_memory 60 $programs/device_memory_test
      step ipc_conformance 90 $programs/ipc_transport_test
      for channel in ipc nccl; do
        export RRFP_TEST_CHANNEL=$channel
        step ${channel}_messages 120 $programs/device_transport_test
        step ${channel}_failures 120 $programs/device_failure_test
      done
      ;;
    beside)  # 20,000 messages each beside all-reduces of torch
      for connections in 1 8 32; do
        for channel in ipc nccl; do
          [ $channel$connections = nccl1 ] && continue
          step beside_${channel}_$connections 120 env PYTHONPATH="$PWD" OMP_NUM_THREADS=1 \
            CUDA_DEVICE_MAX_CONNECTIONS=$connections torchrun --nproc-per-node 2 \
            tests/distributed/gpu_rank.py --transport $channel --beside-all-reduces \
            --steps 100 --microbatches 100 --check-every 20 --busy-cycles 20000
        done
      done
      ;;
    connections)
      for connections in 1 8 32; do
        for channel in ipc nccl; do
          [ $channel$connections = nccl1 ] && continue
          step ${channel}_with_$connections 90 env RRFP_TEST_CHANNEL=$channel \
            RRFP_TEST_MESSAGES=3000 CUDA_DEVICE_MAX_CONNECTIONS=$connections \
            $programs/device_transport_test random_messages_two
        done
      done
      ;;
    measure)
      step measure 200 env PYTHONPATH="$PWD" python3 benchmarks/gpu/messages.py \
        $programs/gpu_messages --runs 1
      ;;
    extension)
      step extension 180 env RRFP_CMAKE_ARGS=-DRRFP_CUDA=on python3 setup.py build_ext --inplace
      ;;
    python)
      step python 300 env PYTHONPATH="$PWD" python3 -m pytest -q -m gpu tests/python
      ;;
    step)
      step first_step 120 env PYTHONPATH="$PWD" torchrun --nproc-per-node 2 \
        benchmarks/gpu/first_step.py "$out/first_step.json"
      ;;
    random)
      for channel in ipc nccl; do
        step random_$channel 90 env PYTHONPATH="$PWD" torchrun --nproc-per-node 2 \
          tests/distributed/gpu_rank.py --transport $channel --steps 500 --longest 3000 \
          --check-every 5 --microbatches 6 --check-memory
      done
      ;;
    sanitize)
      step sanitize 200 env RRFP_TEST_CHANNEL=ipc RRFP_TEST_MESSAGES=60 compute-sanitizer \
        --target-processes all --error-exitcode 9 $programs/device_transport_test random_messages_two
      ;;
  esac
done
echo "== $failed steps failed"
exit $((failed > 0))
