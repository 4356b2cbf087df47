// A subcommand of tokroute-sim: what to run if it was the one given.
#ifndef TOKROUTE_SRC_TOOLS_COMMAND_H_
#define TOKROUTE_SRC_TOOLS_COMMAND_H_

#include <functional>

#include "CLI/CLI.hpp"

namespace tokroute::tools {

// `run` returns the exit status: 0, 1 if something went wrong, 2 if the input or an option was.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Command AddReplayCommand(CLI::App& tool);     // replay_command.cc
Command AddCalibrateCommand(CLI::App& tool);  // calibrate_command.cc

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_COMMAND_H_
