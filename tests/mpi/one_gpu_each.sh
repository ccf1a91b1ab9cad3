#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
# Runs a command with one visible GPU, another one for each rank of the machine as far as there are that many.
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?is not set: no MPI launcher that is known here}}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
[ "$gpus" -gt 0 ] || gpus=1
TEST_GPUS=$gpus CUDA_VISIBLE_DEVICES=$((rank % gpus)) exec "$@"
