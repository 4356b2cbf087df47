// tokroute-sim: what the library's policies do, tried out on simulated endpoints. One subcommand per file.
#include <exception>
#include <iostream>
#include <new>
#include <vector>

#include "CLI/CLI.hpp"
#include "command.h"

int main(int argc, char** argv) {
  using tokroute::tools::Command;
  try {
    CLI::App tool("Tries out tokroute's policies on simulated endpoints.", "tokroute-sim");
    tool.set_version_flag("--version", "tokroute-sim " TOKROUTE_VERSION);
    tool.require_subcommand(1);
    const std::vector<Command> commands = {tokroute::tools::AddReplayCommand(tool), tokroute::tools::AddCalibrateCommand(tool)};
    try {
      tool.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() == 0) return tool.exit(error);  // --help and --version.
      std::cerr << error.what() << "\nRun with --help for more.\n";
      return 2;
    }
    for (const Command& command : commands) {
      if (command.app->parsed()) return command.run();
    }
    return 2;  // Not reached: a subcommand is required.
  } catch (const std::bad_alloc&) {
    std::cerr << "out of memory\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}
