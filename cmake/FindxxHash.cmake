# Finds xxHash for header-only use and defines xxHash::xxhash.
#
# Upstream's package config comes first. Where there is none (Debian and Ubuntu ship only a pkg-config file), the header
# is looked for where pkg-config points, then in the usual places. The target made here carries an include directory and
# no library: it serves XXH_INLINE_ALL, which is all that tokroute uses.
#
# Sets xxHash_FOUND and xxHash_VERSION.
include(FindPackageHandleStandardArgs)

find_package(xxHash ${xxHash_FIND_VERSION} CONFIG QUIET)
if(TARGET xxHash::xxhash)
  find_package_handle_standard_args(xxHash CONFIG_MODE)
  return()
endif()

find_package(PkgConfig QUIET)
if(PKG_CONFIG_FOUND)
  pkg_check_modules(PC_xxHash QUIET libxxhash)
endif()
find_path(xxHash_INCLUDE_DIR xxhash.h HINTS ${PC_xxHash_INCLUDE_DIRS})
mark_as_advanced(xxHash_INCLUDE_DIR)

# The header knows its version better than a pkg-config file that may belong to another copy.
unset(xxHash_VERSION)
if(xxHash_INCLUDE_DIR)
  set(_xxhash_parts)
  foreach(_xxhash_part IN ITEMS MAJOR MINOR RELEASE)
    file(STRINGS "${xxHash_INCLUDE_DIR}/xxhash.h" _xxhash_line
         REGEX "^#[ \t]*define[ \t]+XXH_VERSION_${_xxhash_part}[ \t]+[0-9]+" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+" _xxhash_number "${_xxhash_line}")
    list(APPEND _xxhash_parts "${_xxhash_number}")
  endforeach()
  list(JOIN _xxhash_parts "." xxHash_VERSION)
  unset(_xxhash_parts)
  unset(_xxhash_part)
  unset(_xxhash_line)
  unset(_xxhash_number)
endif()

find_package_handle_standard_args(
  xxHash
  REQUIRED_VARS xxHash_INCLUDE_DIR
  VERSION_VAR xxHash_VERSION)
if(xxHash_FOUND AND NOT TARGET xxHash::xxhash)
  add_library(xxHash::xxhash INTERFACE IMPORTED)
  set_target_properties(xxHash::xxhash PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${xxHash_INCLUDE_DIR}")
endif()
