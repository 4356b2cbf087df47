# An overlay port: vcpkg install tokroute --overlay-ports=<checkout>/cmake/vcpkg-port
#
# It builds the checkout that it lies in, since nothing is released yet. The port of a release has, instead of the next
# line, vcpkg_from_github(OUT_SOURCE_PATH SOURCE_PATH REPO <owner>/tokroute REF "v${VERSION}" SHA512 <of the archive>).
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS FEATURES tools TOKROUTE_BUILD_TOOLS)

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    -DTOKROUTE_BUILD_TESTS=OFF
    -DTOKROUTE_BUILD_BENCHMARKS=OFF
    -DTOKROUTE_BUILD_EXAMPLES=OFF
    -DTOKROUTE_BUILD_FUZZERS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/tokroute)
if("tools" IN_LIST FEATURES)
  vcpkg_copy_tools(TOOL_NAMES tokroute-conformance tokroute-index-bench tokroute-sim AUTO_CLEAN)
endif()

# The licence goes where vcpkg wants it, once.
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share"
     "${CURRENT_PACKAGES_DIR}/share/licenses")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
