! SPDX-License-Identifier: BSD-3-Clause
! The ranks in Fortran of a job whose others run mixed.cpp, which makes the same calls.
#ifdef USE_F08
#define COMM_T type(MPI_Comm)
#define REQUEST_T type(MPI_Request)
#else
#define COMM_T integer
#define REQUEST_T integer
#endif
program test_mixed
#ifdef USE_F08
  use mpi_f08
#else
  use mpi
#endif
  implicit none
  COMM_T :: copy, part
  character(10) :: how
  integer :: rank, provided, ierr

  call get_command_argument(1, how)
  if (how == 'thread') then
    call MPI_Init_thread(MPI_THREAD_SINGLE, provided, ierr)
  else
    call MPI_Init(ierr)
  end if
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call tell(MPI_COMM_WORLD)
  call post(MPI_COMM_WORLD)
  call reduce(MPI_COMM_WORLD)
  call post(MPI_COMM_WORLD)
  call MPI_Barrier(MPI_COMM_WORLD, ierr)

  call MPI_Comm_dup(MPI_COMM_WORLD, copy, ierr)
  call post(copy)
  call tell(copy)
  call post(copy)
  call MPI_Barrier(copy, ierr)
  call reduce(copy)
  call post(copy)
  call MPI_Comm_split(copy, 0, rank, part, ierr)
  call tell(part)
  call post(part)
  call MPI_Comm_free(part, ierr)

  call MPI_Comm_split(copy, 2, rank, part, ierr)
  call reduce(part)
  call post(part)
  call MPI_Barrier(part, ierr)
  call post(part)
  call MPI_Comm_free(part, ierr)
  call MPI_Comm_free(copy, ierr)
  print '(a)', 'fortran: fine'
  call MPI_Finalize(ierr)

contains

  subroutine reduce(comm)
    COMM_T, intent(in) :: comm
    integer :: mine, all, ranks
    call MPI_Comm_size(comm, ranks, ierr)
    mine = 1
    all = -1
    call MPI_Allreduce(mine, all, 1, MPI_INTEGER, MPI_SUM, comm, ierr)
    if (all /= ranks) call wrong('allreduce', all)
  end subroutine

  subroutine post(comm)
    COMM_T, intent(in) :: comm
    integer, asynchronous :: mine, all
    integer :: ranks
    REQUEST_T :: request
    call MPI_Comm_size(comm, ranks, ierr)
    mine = 1
    all = -1
    call MPI_Iallreduce(mine, all, 1, MPI_INTEGER, MPI_SUM, comm, request, ierr)
    call MPI_Wait(request, MPI_STATUS_IGNORE, ierr)
    if (all /= ranks) call wrong('iallreduce', all)
  end subroutine

  subroutine tell(comm)
    COMM_T, intent(in) :: comm
    integer :: me, value
    call MPI_Comm_rank(comm, me, ierr)
    value = -1
    if (me == 0) value = 7
    call MPI_Bcast(value, 1, MPI_INTEGER, 0, comm, ierr)
    if (value /= 7) call wrong('bcast', value)
  end subroutine

  subroutine wrong(what, value)
    character(*), intent(in) :: what
    integer, intent(in) :: value
    print *, 'rank', rank, ' in Fortran: wrong: ', what, value
    call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
  end subroutine
end program
