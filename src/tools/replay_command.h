// `tokroute-sim replay`: its options, and what it does with them.
#ifndef TOKROUTE_SRC_TOOLS_REPLAY_COMMAND_H_
#define TOKROUTE_SRC_TOOLS_REPLAY_COMMAND_H_

#include <functional>

#include "CLI/CLI.hpp"

namespace tokroute::tools {

// A subcommand: what to run if it was the one given. Returns the exit status: 0, 1 if something went wrong, 2 if the
// input or an option was.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;
};

Command AddReplayCommand(CLI::App& tool);

}  // namespace tokroute::tools

#endif  // TOKROUTE_SRC_TOOLS_REPLAY_COMMAND_H_
