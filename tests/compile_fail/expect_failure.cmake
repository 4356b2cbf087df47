# cmake -DCOMPILER=... -DSTANDARD=... -DINCLUDES=a;b -DSOURCE=x.cc -DPATTERNS=r1;r2 -P expect_failure.cmake
#
# Succeeds if SOURCE fails to compile for the stated reason; see tokroute_add_compile_fail_test in tests/CMakeLists.txt.

# The messages are read, so they must be English and without colour codes, whatever the caller's terminal wants.
set(ENV{LC_ALL} C)
unset(ENV{GCC_COLORS})
set(ENV{CLICOLOR_FORCE} 0)

set(flags ${STANDARD} -fsyntax-only -fno-diagnostics-color)
foreach(dir IN LISTS INCLUDES)
  list(APPEND flags "-I${dir}")
endforeach()

# The control first: a snippet that is broken anyway proves nothing.
execute_process(COMMAND "${COMPILER}" ${flags} -DTOKROUTE_COMPILE_FAIL_CONTROL "${SOURCE}"
                RESULT_VARIABLE result ERROR_VARIABLE stderr OUTPUT_QUIET)
if(NOT result EQUAL 0)
  message("${stderr}")
  message(FATAL_ERROR "${SOURCE}: does not compile with TOKROUTE_COMPILE_FAIL_CONTROL either.")
endif()

execute_process(COMMAND "${COMPILER}" ${flags} "${SOURCE}"
                RESULT_VARIABLE result ERROR_VARIABLE stderr OUTPUT_QUIET)
if(result EQUAL 0)
  message(FATAL_ERROR "${SOURCE}: compiles, and must not.")
endif()

# Only the first error counts: it is the one that the user reads. A plain loop over lines, because messages contain
# semicolons and brackets, which CMake lists mangle.
set(first_error "")
set(rest "${stderr}\n")
while(NOT rest STREQUAL "")
  string(FIND "${rest}" "\n" end)
  string(SUBSTRING "${rest}" 0 ${end} line)
  math(EXPR end "${end} + 1")
  string(SUBSTRING "${rest}" ${end} -1 rest)
  if(line MATCHES "(^|[: ])error[: ]")
    set(first_error "${line}")
    break()
  endif()
endwhile()
if(first_error STREQUAL "")
  message("${stderr}")
  message(FATAL_ERROR "${SOURCE}: the compiler failed (${result}) without an error line.")
endif()

foreach(pattern IN LISTS PATTERNS)
  if(NOT first_error MATCHES "${pattern}")
    message("${stderr}")
    message(FATAL_ERROR "${SOURCE}: fails for another reason.\n  first error: ${first_error}\n  want: ${pattern}")
  endif()
endforeach()
message("${first_error}")
