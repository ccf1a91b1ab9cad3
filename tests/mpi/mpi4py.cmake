# SPDX-License-Identifier: BSD-3-Clause
# mpi4py's own tests of collectives (its source package from PyPI), without and with the preload library: the outcome
# must be the same, and calls must be served. With arrays on a device, all must pass.
execute_process(COMMAND ${TRIB_PYTHON} -c "import mpi4py; print(mpi4py.__version__)"
                OUTPUT_VARIABLE TRIB_MPI4PY_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT TRIB_MPI4PY_VERSION)
  message(STATUS "tests/mpi: ${TRIB_PYTHON} has no mpi4py: its tests are not run")
  return()
endif()
foreach(mpi mpich openmpi intel)
  if(mpi STREQUAL intel)
    set(root ${TRIB_INTEL_ROOT})
  else()
    string(TOUPPER ${mpi} MPI)
    set(root ${TRIB_${MPI}_ROOT})
  endif()
  if(NOT root OR (mpi STREQUAL intel AND NOT TRIB_MPICH_ROOT))
    continue()
  endif()
  set(ranks 2)
  if(mpi STREQUAL mpich)
    set(ranks 2,3)
  endif()
  add_test(NAME mpi.${mpi}.mpi4py
    COMMAND ${TRIB_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/mpi4py_suite.py --mpis ${mpis_json} --mpi ${mpi} --ranks ${ranks}
            --version ${TRIB_MPI4PY_VERSION} --folder ${CMAKE_CURRENT_BINARY_DIR})
  set_tests_properties(mpi.${mpi}.mpi4py PROPERTIES LABELS mpi TIMEOUT 900 PROCESSORS 2 SKIP_RETURN_CODE 77
                       RESOURCE_LOCK mpi4py-source)
  if(TARGET protected_driver)
    add_test(NAME mpi.${mpi}.mpi4py-protected
      COMMAND ${TRIB_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/mpi4py_suite.py --mpis ${mpis_json} --mpi ${mpi} --ranks 2
              --version ${TRIB_MPI4PY_VERSION} --folder ${CMAKE_CURRENT_BINARY_DIR} --device $<TARGET_FILE:protected_driver>)
    set_tests_properties(mpi.${mpi}.mpi4py-protected PROPERTIES LABELS mpi TIMEOUT 600 PROCESSORS 2 SKIP_RETURN_CODE 77
                         RESOURCE_LOCK mpi4py-source)
  endif()
  foreach(kind cupy torch)
    trib_mpi_gpu_test(gpu_${kind} ${mpi} 1,2,3,4 --timeout 200 --env LD_LIBRARY_PATH=${root}/lib --expect "results checked"
                      ${TRIB_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/gpu_python.py ${kind})
  endforeach()
endforeach()
