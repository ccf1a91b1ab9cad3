// SPDX-License-Identifier: BSD-3-Clause
// Every function of the driver that the backend looks up, for those that driver.cpp does not
// define.
#include "backend/cuda/driver.hpp"

extern "C" CUresult trib_fake_unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }

#define TRIB_TEXT2(name) #name
#define TRIB_TEXT(name) TRIB_TEXT2(name)
#define TRIB_STUB(name) \
  asm(".weak " TRIB_TEXT(name) "\n.set " TRIB_TEXT(name) ", trib_fake_unsupported");
TRIB_DRIVER_TO_STAGE(TRIB_STUB)
TRIB_DRIVER_FOR_KERNELS(TRIB_STUB)
