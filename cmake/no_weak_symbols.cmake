# Fails if one of the object files of a SIMD level defines a weak symbol (a template of the standard library, say): the
# linker may take that copy for the whole library, on processors that lack the level's instructions.
#
#   cmake -DNM=nm -DLEVEL=avx512 -DOBJECTS="a.o;b.o" -P no_weak_symbols.cmake
list(FILTER OBJECTS INCLUDE REGEX "/${LEVEL}\\.cpp\\.o$")
list(LENGTH OBJECTS n_objects)
if(NOT n_objects EQUAL 1)
  message(FATAL_ERROR "expected one object file of ${LEVEL}.cpp, not ${n_objects}")
endif()
execute_process(COMMAND ${NM} --demangle --defined-only ${OBJECTS} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
if(NOT symbols MATCHES "cgx_")
  message(FATAL_ERROR "${OBJECTS} defines no kernels:\n${symbols}")
endif()
string(REGEX MATCHALL "[^\n]* W [^\n]*" weak "${symbols}")
if(weak)
  list(JOIN weak "\n" weak)
  message(FATAL_ERROR "${LEVEL}.cpp defines what other levels may be linked to:\n${weak}")
endif()
