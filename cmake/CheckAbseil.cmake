# Refuses an abseil whose libraries do not match its headers as this build compiles them.
#
# Whether absl::string_view, optional and variant are the standard ones is decided by absl/base/options.h and, where that
# says "automatic", by the language standard. An abseil compiled as C++14 has its own; C++20 code that uses its headers
# then asks the linker for functions that are not there, with messages that nobody reads as "wrong standard". So ask the
# linker here. Only for an installed abseil: one that is built along with us has our standard or is its owner's business.
include_guard(DIRECTORY)

function(tokroute_check_abseil)
  get_target_property(imported absl::status IMPORTED)
  if(NOT imported OR CMAKE_CROSSCOMPILING)
    return()
  endif()
  get_target_property(where absl::status INTERFACE_INCLUDE_DIRECTORIES)
  if(TOKROUTE_ABSEIL_CHECKED STREQUAL "${where}")
    return()  # It costs a second; asked again when another abseil is given.
  endif()
  set(source "${PROJECT_BINARY_DIR}/CMakeFiles/check_abseil.cc")
  # Each line takes or gives text across the border to a compiled function.
  file(WRITE "${source}"
       "#include <string>
#include \"absl/status/status.h\"
#include \"absl/strings/match.h\"
#include \"absl/strings/str_cat.h\"
int main(int argc, char** argv) {
  const absl::string_view text(argv[0]);
  const absl::Status status = absl::InvalidArgumentError(absl::StrCat(text, argc));
  return absl::EqualsIgnoreCase(status.message(), text) ? 1 : 0;
}
")
  set(CMAKE_TRY_COMPILE_TARGET_TYPE EXECUTABLE)
  try_compile(
    links "${PROJECT_BINARY_DIR}/CMakeFiles/check_abseil" "${source}"
    LINK_LIBRARIES absl::status absl::strings
    OUTPUT_VARIABLE output
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
  if(NOT links)
    message(
      FATAL_ERROR
        "tokroute: a program of five lines that uses absl::Status and absl::StrCat does not build with the abseil in "
        "${where}. If it compiles and does not link, the libraries were compiled with other options than their headers "
        "have as C++20: as C++14 or older, say (they then have a string_view of their own), or absl/base/options.h was "
        "changed afterwards. Build abseil with -DCMAKE_CXX_STANDARD=20 (17 will do), or give another with "
        "-Dabsl_DIR=. The compiler said:\n${output}")
  endif()
  set(TOKROUTE_ABSEIL_CHECKED "${where}" CACHE INTERNAL "The abseil that was found fit")
endfunction()
tokroute_check_abseil()
