// tokroute-conformance: runs vector files through the plugins that users link.
#include <exception>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "tools/conformance/differences.h"
#include "tools/conformance/runner.h"
#include "tools/conformance/vectors.h"

namespace {

using namespace tokroute::conformance;  // NOLINT: a program, not a header.

// Nothing was compared: bad arguments, folders, files or lists.
constexpr int kCannotRun = 2;

int Complain(const absl::Status& status) {
  std::cerr << "tokroute-conformance: " << status.message() << '\n';
  return kCannotRun;
}

int Run(const std::vector<std::string>& folders, const std::string& list, const RunOptions& options) {
  const absl::StatusOr<std::vector<Difference>> differences =
      list.empty() ? BuiltInDifferences() : ReadDifferences(list);
  if (!differences.ok()) return Complain(differences.status());
  std::vector<VectorFile> files;
  for (const std::string& folder : folders) {
    absl::StatusOr<std::vector<VectorFile>> more = ReadFolder(folder);
    if (!more.ok()) return Complain(more.status());
    for (VectorFile& file : *more) files.push_back(std::move(file));
  }
  return RunFiles(files, *differences, options, std::cout).failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App tool(
        "Runs every vector file (*.json) of the given folders through tokroute's plugins. Exit status: 0 if nothing "
        "failed, "
        "1 if something did, 2 if nothing could be run.",
        "tokroute-conformance");
    std::vector<std::string> folders;
    std::string list;
    RunOptions options;
    tool.set_version_flag("--version", "tokroute-conformance " TOKROUTE_VERSION);
    tool.add_option("DIR", folders, "Folders with vector files, each named after its plugin")->required();
    tool.add_option("--differences", list, "A list of differences on purpose (JSON) instead of the built-in one");
    tool.add_flag("--complete", options.complete, "Fail for differences that no case in these folders meets");
    tool.add_flag("-v,--verbose", options.every_case, "Print every case");
    try {
      tool.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return tool.exit(error) == 0 ? 0 : kCannotRun;
    }
    return Run(folders, list, options);
  } catch (const std::exception& error) {
    std::cerr << "tokroute-conformance: " << error.what() << '\n';
    return kCannotRun;
  }
}
