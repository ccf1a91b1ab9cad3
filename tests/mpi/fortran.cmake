# SPDX-License-Identifier: BSD-3-Clause
# Fortran programs: mpif.h, the mpi module, mpi_f08. The PyPI wheels have no Fortran, Debian's MPIs do; they run with the
# preload libraries built for the wheels, as the ABI is the same.
add_executable(mpi_local fortran/local.cpp)
target_link_libraries(mpi_local PRIVATE trib_options ${CMAKE_DL_LIBS})
set_target_properties(mpi_local PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
add_dependencies(mpi_tests mpi_local)
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
  set(definitions)
  if(family STREQUAL mpich)  # Debian's Open MPI has none
    set(definitions -DHAS_PERSISTENT)
  endif()
  foreach(source mpif.F90 mpi.F90 mpi_f08.F90)
    cmake_path(GET source STEM name)
    set(served --expect "  reduce_scatter_block ")
    if(family STREQUAL openmpi)
      foreach(form iallreduce ireduce ireduce_scatter ireduce_scatter_block)
        list(APPEND served --expect "  ${form} ")
      endforeach()
    elseif(NOT name STREQUAL mpi_f08)  # which completes its requests by itself
      foreach(form iallreduce allreduce_init reduce_init reduce_scatter_init reduce_scatter_block_init)
        list(APPEND served --expect "  ${form} ")
      endforeach()
    endif()
    set(program ${CMAKE_CURRENT_BINARY_DIR}/fortran_${name}_${family})
    foreach(output ${program} ${program}.so)
      set(shared)
      if(output MATCHES "so$")
        set(shared -shared -fPIC)
      endif()
      add_custom_command(OUTPUT ${output}
        COMMAND ${TRIB_FORTRAN_${family}} -O1 -w -cpp ${definitions} -fallow-argument-mismatch ${shared} -I${CMAKE_CURRENT_SOURCE_DIR} -J${CMAKE_CURRENT_BINARY_DIR}
                ${CMAKE_CURRENT_SOURCE_DIR}/fortran/${source} -o ${output}
        DEPENDS fortran/${source} fortran/body.inc)
    endforeach()
    add_custom_target(build_fortran_${name}_${family} ALL DEPENDS ${program} ${program}.so)
    add_dependencies(mpi_tests build_fortran_${name}_${family})
    trib_mpi_test(fortran-${name} ${mpi} 2,3 --env TRIB_STATS=1 --expect "fortran: fine" ${served} --expect "  user-defined operator "
                  ${program})
    trib_mpi_test(fortran-${name}-without ${mpi} 2 --no-preload --expect "fortran: fine" ${program})
    trib_mpi_test(fortran-${name}-local ${mpi} 2 --env TRIB_STATS=1 --expect "fortran: fine" ${served} --expect "  user-defined operator "
                  -- ${CMAKE_CURRENT_BINARY_DIR}/mpi_local ${program}.so)
  endforeach()
  set(program ${CMAKE_CURRENT_BINARY_DIR}/fortran_staged_${family})
  string(TOUPPER ${family} FAMILY)
  add_custom_command(OUTPUT ${program}
    COMMAND ${TRIB_FORTRAN_${family}} -O1 -w -cpp -D${FAMILY} -fallow-argument-mismatch -J${CMAKE_CURRENT_BINARY_DIR}
            ${CMAKE_CURRENT_SOURCE_DIR}/fortran/staged.F90 -o ${program}
    DEPENDS fortran/staged.F90)
  add_custom_target(build_fortran_staged_${family} ALL DEPENDS ${program})
  add_dependencies(mpi_tests build_fortran_staged_${family})
  trib_mpi_gpu_test(fortran-staged ${mpi} 2,3 --expect "things checked" ${program})
  set(ranks 1,2,3)
  if(family STREQUAL openmpi)  # whose own MPI_Recv on one rank says nothing of a message that is too long
    set(ranks 2,3)
  endif()
  trib_mpi_protected_test(fortran-staged-protected ${mpi} ${ranks} --env TRIB_STATS=1 --expect "things checked"
                          --expect "GPU buffers through host memory" ${program})
  if(family STREQUAL mpich)  # Open MPI's own MPI_Waitsome of mpi_f08 goes wrong where a request fails
    trib_mpi_test(fortran-staged-without ${mpi} 1,2 --no-preload --expect "things checked" -- ${program} host)
  endif()
  if(TARGET mpi_communicators_${family} AND NOT TRIB_PRELOADS STREQUAL "")
    # The same library under the system's older MPI, in C.
    find_program(TRIB_CXX_${family} mpicxx.${family} DOC "C++ compiler of the system's MPI, for tests")
    if(TRIB_CXX_${family})
      foreach(name properties communicators passthrough errors mixed)
        set(program ${CMAKE_CURRENT_BINARY_DIR}/mpi_${name}_debian_${family})
        add_custom_command(OUTPUT ${program}
          COMMAND ${TRIB_CXX_${family}} -std=c++20 -O1 -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX
                  ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cpp -o ${program} -ldl
          DEPENDS ${name}.cpp check.hpp)
        add_custom_target(build_mpi_${name}_debian_${family} ALL DEPENDS ${program})
        add_dependencies(mpi_tests build_mpi_${name}_debian_${family})
        if(NOT name MATCHES "^(errors|mixed)$")
          trib_mpi_test(${name} ${mpi} 2,3 ${program})
        endif()
      endforeach()
      # Ranks in C and in Fortran.
      set(c ${CMAKE_CURRENT_BINARY_DIR}/mpi_mixed_debian_${family})
      foreach(how mpi f08)
        set(program ${CMAKE_CURRENT_BINARY_DIR}/fortran_mixed_${how}_${family})
        string(TOUPPER ${how} HOW)
        add_custom_command(OUTPUT ${program}
          COMMAND ${TRIB_FORTRAN_${family}} -O1 -w -cpp -DUSE_${HOW} -fallow-argument-mismatch ${CMAKE_CURRENT_SOURCE_DIR}/fortran/mixed.F90
                  -o ${program}
          DEPENDS fortran/mixed.F90)
        add_custom_target(build_fortran_mixed_${how}_${family} ALL DEPENDS ${program})
        add_dependencies(mpi_tests build_fortran_mixed_${how}_${family})
        set(expected --timeout 60 --expect "c: fine" --expect "fortran: fine")
        trib_mpi_test(mixed-${how} ${mpi} 1,2 ${expected} --also ${program} ${c})
        trib_mpi_test(mixed-${how}-thread ${mpi} 1 ${expected} --also "${c} thread" ${program} thread)
        trib_mpi_test(mixed-${how}-disabled ${mpi} 1 --env TRIB_ENABLE=0 ${expected} --also ${c} ${program})
        trib_mpi_test(mixed-${how}-without ${mpi} 1 --no-preload ${expected} --also ${c} ${program})
      endforeach()
      trib_mpi_test(errors ${mpi} 2,3 --env TEST_OWN_CLASSES=1 --expect "as expected" --
                    ${CMAKE_CURRENT_BINARY_DIR}/mpi_errors_debian_${family} count)
    endif()
    if(TRIB_CXX_${family} AND family STREQUAL openmpi)
      # Persistent reductions, which this MPI lacks, by mpi_persistent.h: the programs are linked with Tributary.
      set(at ${CMAKE_CURRENT_BINARY_DIR}/mpi_)
      set(link -L$<TARGET_FILE_DIR:tributary_${family}> -ltributary_${family} -Wl,-rpath,$<TARGET_FILE_DIR:tributary_${family}>)
      foreach(name requests tuning emulation emulation_behind)
        set(program ${at}${name}_debian_linked)
        string(REPLACE _behind "" source ${name})
        set(before)
        if(name STREQUAL emulation_behind)
          set(before -lmpi)
        endif()
        add_custom_command(OUTPUT ${program}
          COMMAND ${TRIB_CXX_${family}} -std=c++20 -O1 -DOMPI_SKIP_MPICXX -DTEST_LINKED=1 -I${PROJECT_SOURCE_DIR}/include
                  ${CMAKE_CURRENT_SOURCE_DIR}/${source}.cpp -o ${program} ${before} ${link} -ldl
          DEPENDS ${source}.cpp check.hpp gpu.hpp requests_bag.hpp requests_reduction.hpp
                  ${PROJECT_SOURCE_DIR}/include/tributary/mpi_persistent.h tributary_${family})
        add_custom_target(build_mpi_${name}_debian_linked ALL DEPENDS ${program})
        add_dependencies(mpi_tests build_mpi_${name}_debian_linked)
      endforeach()
      trib_mpi_test(requests ${mpi} 2 --expect "requests: " ${at}requests_debian_linked)
      trib_mpi_test(requests-linked ${mpi} 2,3 --no-preload --env TRIB_STATS=1 --expect "allreduce_init" --expect "requests: "
                    ${at}requests_debian_linked)
      set(freed first persistent-order persistent-free-active persistent-comm-freed)
      trib_mpi_test(requests-ours ${mpi} 2,3 --expect "requests: " ${at}requests_debian_linked ${freed} pending-comm-freed)
      trib_mpi_test(requests-disabled ${mpi} 2 --no-preload --env TRIB_ENABLE=0 --expect "requests: "
                    ${at}requests_debian_linked ${freed} late persistent persistent-mixed persistent-often threads communicators
                    errors)
      trib_mpi_test(emulation ${mpi} 1,2,3,4 --expect "emulation: " ${at}emulation_debian_linked)
      trib_mpi_test(emulation-linked ${mpi} 2,3 --no-preload --expect "emulation: " ${at}emulation_debian_linked)
      trib_mpi_protected_test(emulation-protected ${mpi} 1,2,3 --env TRIB_STATS=1 --expect "emulation: "
                              --expect "GPU buffers through host memory" ${at}emulation_debian_linked)
      trib_mpi_test(emulation-behind ${mpi} 1,2 --no-preload --expect "emulation: refused" ${at}emulation_behind_debian_linked
                    behind)
      trib_mpi_test(emulation-preloaded ${mpi} 2 --expect "emulation: " ${at}emulation_behind_debian_linked)
      trib_mpi_test(tuning-linked ${mpi} 2 --no-preload --env TRIB_TUNE_BUDGET_MS=100 --expect "bits "
                    ${at}tuning_debian_linked)
    endif()
  endif()
endforeach()
