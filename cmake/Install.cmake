# Install rules: library, headers, licence, and a relocatable package for find_package(tokroute).
include(CMakePackageConfigHelpers)

set(TOKROUTE_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/tokroute")

install(
  TARGETS tokroute
  EXPORT tokrouteTargets
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}"
  FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(
  EXPORT tokrouteTargets
  NAMESPACE tokroute::
  DESTINATION "${TOKROUTE_CMAKE_DIR}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/tokrouteConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/tokrouteConfig.cmake" INSTALL_DESTINATION "${TOKROUTE_CMAKE_DIR}")
# While the major version is 0 each minor version may break the one before.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/tokrouteConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/tokrouteConfig.cmake" "${PROJECT_BINARY_DIR}/tokrouteConfigVersion.cmake"
        DESTINATION "${TOKROUTE_CMAKE_DIR}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/tokroute")
