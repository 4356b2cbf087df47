// 10,000 decisions, first tokens and ends between two marks. tests/packaging/quiet.sh watches it from outside.
//
//   (no argument)   the marks are one write each to the standard error, which is unbuffered
//   confined        between the marks the kernel kills the process for any system call but read, write and exit
//   confined-open, open, thread   the same with one file opened or one thread started, to see that it is noticed
//
// Everything is routed before, so that what is allocated once is allocated.
#include <fcntl.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tokroute/tokroute.h"

namespace {

struct Upstream {
  std::string host;
  std::string_view name() const { return host; }
};

void Mark(std::string_view text) {
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(3);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  tokroute::Fleet<Upstream> fleet;
  for (int i = 0; i < 16; ++i) {
    if (!fleet.Add({"upstream-" + std::to_string(i)}).ok()) return 2;
  }
  // A small cache, so that the index evicts all the time and has reached its size after the warm-up.
  auto router = tokroute::PrefillBound(fleet, {.peak_prefill_throughput = 20480,
                                               .max_ttft_penalty = std::chrono::seconds(1),
                                               .exploration_probability = 0.05,
                                               .index_options = {.default_capacity_tokens = 8192}});
  if (!router.ok()) return 2;
  for (auto [name, status] :
       {std::pair("least", router->SetPolicy("least", tokroute::Policy(tokroute::ActiveRequestScorer(),
                                                                       tokroute::MaxScorePicker<>()))),
        std::pair("cyclic", router->SetPolicy("cyclic", tokroute::Policy(tokroute::RoundRobinPicker()))),
        std::pair("random", router->SetPolicy("random", tokroute::Policy(tokroute::RandomPicker())))}) {
    if (!status.ok()) return std::fprintf(stderr, "%s: %s\n", name, status.ToString().c_str()), 2;
  }

  constexpr const char* kPolicies[] = {"", "", "least", "cyclic", "random"};
  std::vector<tokroute::TokenId> prompt(1024);
  std::vector<tokroute::Ticket<Upstream>> open(32);
  std::uint32_t next = 0, routed = 0;
  const auto serve = [&](std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i, ++next) {
      // 200 conversations of growing prompts.
      const std::uint32_t length = 64 + 32 * ((next / 200) % 30);
      for (std::uint32_t t = 0; t < length; ++t) prompt[t] = (next % 200) * 4096 + t;
      auto result = router->Route({.tokens = std::span(prompt).first(length), .model = "m", .max_output_tokens = 100},
                                  {.policy = kPolicies[next % 5]});
      if (!result.ok()) continue;
      ++routed;
      tokroute::Ticket<Upstream>& ticket = open[next % open.size()];
      if (next % 7 != 0) ticket.Finish({.output_tokens = 10, .cached_tokens = 0});  // Else dropped: an abort.
      ticket = std::move(result).Take();
      if (next % 3 != 0) ticket.FirstToken();
    }
  };
  serve(20'000);

  const bool confined = mode.substr(0, 8) == "confined";
  Mark("BEGIN\n");
  if (confined && prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0) {
    Mark("cannot be confined\n");
    return 4;
  }
  routed = 0;
  serve(5'000);
  if (mode == "open" || mode == "confined-open") {
    const int file = ::open("/dev/null", O_RDONLY);
    if (file >= 0) (void)close(file);
  }
  if (mode == "thread") std::thread([] {}).join();
  serve(5'000);
  const bool all = routed == 10'000;
  Mark(all ? "END\n" : "not all were routed\n");
  // Strict confinement knows exit, but not the exit_group that the C library calls.
  if (confined) syscall(SYS_exit, all ? 0 : 1);
  if (!router->Audit().ok()) return 1;
  return all ? 0 : 1;
}
