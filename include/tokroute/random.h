// Random: the library's own generator, so that draws are the same bits everywhere.
#ifndef TOKROUTE_RANDOM_H_
#define TOKROUTE_RANDOM_H_

#include <cstdint>

namespace tokroute {
inline namespace v0 {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014; public-domain constants).
// std::*_distribution differ between standard libraries and are not used. Not for secrets. Not thread-safe; each
// decision and stage has its own.
class Random {
 public:
  explicit Random(std::uint64_t seed) noexcept : state_(seed) {}

  // Keyed by (seed, decision, stage): one plugin's draws never shift another's. Mixed at the first draw, since most
  // stages of most decisions never draw.
  static Random For(std::uint64_t seed, std::uint64_t decision, std::uint64_t stage) noexcept {
    Random random(seed);
    random.decision_ = decision;
    random.stage_ = stage;
    random.keyed_ = true;
    return random;
  }

  std::uint64_t Next() noexcept {
    if (keyed_) {
      state_ = Mix(Mix(Mix(state_) ^ decision_) ^ (stage_ * 0xd1342543de82ef95ULL));
      keyed_ = false;
    }
    return Mix(state_ += 0x9e3779b97f4a7c15ULL);
  }
  // Uniform in [0, bound); 0 for bound 0. One multiplication: the bias is below bound / 2^32.
  std::uint32_t Below(std::uint32_t bound) noexcept {
    return static_cast<std::uint32_t>(((Next() >> 32) * bound) >> 32);
  }
  // Uniform in [0, 1), a multiple of 2^-53.
  double Unit() noexcept { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }

 private:
  static std::uint64_t Mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  std::uint64_t state_, decision_ = 0, stage_ = 0;
  bool keyed_ = false;
};

}  // namespace v0
}  // namespace tokroute

#endif  // TOKROUTE_RANDOM_H_
