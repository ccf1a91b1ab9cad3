! SPDX-License-Identifier: BSD-3-Clause
#define REQUEST_T type(MPI_Request)
#define OP_T type(MPI_Op)
#define COMM_T type(MPI_Comm)
#define GROUP_T type(MPI_Group)
#define STATUS_T type(MPI_Status)
#define STATUS_SHAPE
#define OPTIONAL_IERROR
subroutine add_up(in, inout, n, datatype)
  use mpi_f08
  use, intrinsic :: iso_c_binding, only: c_ptr, c_f_pointer
  implicit none
  type(c_ptr), value :: in, inout
  integer :: n
  type(MPI_Datatype) :: datatype
  integer, pointer :: a(:), b(:)
  call c_f_pointer(in, a, [n])
  call c_f_pointer(inout, b, [n])
  b = b + a
end subroutine

program test_mpi_f08
  use mpi_f08
  implicit none
#include "fortran/body.inc"
