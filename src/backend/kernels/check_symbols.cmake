# SPDX-License-Identifier: BSD-3-Clause
# cmake -D NM=... -D OBJECTS=... -P check_symbols.cmake: fails if an object defines a weak symbol. One compiled for
# AVX-512 could be the copy that the linker keeps for everybody (see reduce_kernels.cpp).
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "[^\n]* [VWu] [^\n]*" weak "${symbols}")
  if(weak)
    message(FATAL_ERROR "${object} defines a symbol that others may define as well: ${weak}")
  endif()
endforeach()
