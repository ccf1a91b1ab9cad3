! SPDX-License-Identifier: BSD-3-Clause
#define REQUEST_T integer
#define OP_T integer
#define COMM_T integer
#define GROUP_T integer
#define STATUS_T integer
#define STATUS_SHAPE MPI_STATUS_SIZE,
subroutine add_up(in, inout, n, datatype)
  implicit none
  integer :: n, datatype
  integer :: in(n), inout(n)
  inout = inout + in
end subroutine

program test_mpi
  use mpi
  implicit none
#include "fortran/body.inc"
