# SPDX-License-Identifier: BSD-3-Clause
# Fortran programs: mpif.h, the mpi module, mpi_f08. The PyPI wheels have no Fortran, Debian's MPIs do; they run with the
# preload libraries built for the wheels, as the ABI is the same.
foreach(family mpich openmpi)
  if(NOT family IN_LIST TRIB_PRELOADS)
    continue()
  endif()
  find_program(TRIB_FORTRAN_${family} mpif90.${family} DOC "Fortran compiler of the system's MPI, for tests")
  find_program(TRIB_FORTRAN_LAUNCHER_${family} mpiexec.${family} DOC "mpiexec of the system's MPI, for tests")
  if(NOT TRIB_FORTRAN_${family} OR NOT TRIB_FORTRAN_LAUNCHER_${family})
    message(STATUS "tests/mpi: no mpif90.${family}: no Fortran tests with it")
    continue()
  endif()
  set(mpi debian-${family})
  trib_mpi(${mpi} ${family} ${TRIB_FORTRAN_LAUNCHER_${family}} "" ${family} true)
  foreach(source mpif.F90 mpi.F90 mpi_f08.F90)
    cmake_path(GET source STEM name)
    set(program ${CMAKE_CURRENT_BINARY_DIR}/fortran_${name}_${family})
    add_custom_command(OUTPUT ${program}
      COMMAND ${TRIB_FORTRAN_${family}} -O1 -w -cpp -fallow-argument-mismatch -I${CMAKE_CURRENT_SOURCE_DIR} -J${CMAKE_CURRENT_BINARY_DIR}
              ${CMAKE_CURRENT_SOURCE_DIR}/fortran/${source} -o ${program}
      DEPENDS fortran/${source} fortran/body.inc)
    add_custom_target(build_fortran_${name}_${family} ALL DEPENDS ${program})
    add_dependencies(mpi_tests build_fortran_${name}_${family})
    trib_mpi_test(fortran-${name} ${mpi} 2,3 --env TRIB_STATS=1 --expect "fortran: fine" --expect "  reduce_scatter_block "
                  --expect "  user-defined operator " ${program})
    trib_mpi_test(fortran-${name}-without ${mpi} 2 --no-preload --expect "fortran: fine" ${program})
  endforeach()
  if(TARGET mpi_communicators_${family} AND NOT TRIB_PRELOADS STREQUAL "")
    # The same library under the system's older MPI, in C.
    find_program(TRIB_CXX_${family} mpicxx.${family} DOC "C++ compiler of the system's MPI, for tests")
    if(TRIB_CXX_${family})
      foreach(name properties communicators passthrough errors)
        set(program ${CMAKE_CURRENT_BINARY_DIR}/mpi_${name}_debian_${family})
        add_custom_command(OUTPUT ${program}
          COMMAND ${TRIB_CXX_${family}} -std=c++20 -O1 -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX
                  ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cpp -o ${program} -ldl
          DEPENDS ${name}.cpp check.hpp)
        add_custom_target(build_mpi_${name}_debian_${family} ALL DEPENDS ${program})
        add_dependencies(mpi_tests build_mpi_${name}_debian_${family})
        if(NOT name STREQUAL errors)
          trib_mpi_test(${name} ${mpi} 2,3 ${program})
        endif()
      endforeach()
      trib_mpi_test(errors ${mpi} 2,3 --env TEST_OWN_CLASSES=1 --expect "as expected" --
                    ${CMAKE_CURRENT_BINARY_DIR}/mpi_errors_debian_${family} count)
    endif()
  endif()
endforeach()
