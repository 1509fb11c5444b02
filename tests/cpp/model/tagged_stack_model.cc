// TaggedStack in every interleaving of small cases, with its tag and, as a mutant, without.
#include "comm/tagged_stack.hpp"

#include <array>
#include <memory>
#include <vector>

#include "check.hpp"
#include "model/explorer.hpp"

namespace rrfp::test {

// A std::atomic whose accesses are steps of the Explorer.
template <class T>
class ModelWord {
 public:
  ModelWord() { Explorer::current()->enroll(&value_); }
  T load(std::memory_order) const {
    Explorer::current()->step();
    return seen(value_);
  }
  void store(T value, std::memory_order) {
    Explorer::current()->step();
    value_ = seen(value);
  }
  bool compare_exchange_weak(T& expected, T wanted, std::memory_order, std::memory_order) {
    Explorer::current()->step();
    const bool equal = value_ == expected;
    expected = seen(value_);
    if (equal) value_ = wanted;
    return equal;
  }

 private:
  static T seen(T value) {
    Explorer::current()->observe(value);
    return value;
  }
  T value_ = 0;
};

// A fiber takes slots and gives them back in the order it took them: the one that was on top is
// on top again in the middle of it.
template <std::uint64_t kTagStep>
struct StackRun {
  static constexpr std::uint32_t kSlots = 3;
  using Stack = TaggedStack<ModelWord, kTagStep>;

  StackRun() {
    for (std::uint32_t i = 0; i < kSlots; ++i) stack.push(kSlots - 1 - i, link_of());
  }
  auto link_of() {
    return [this](std::uint32_t index) -> ModelWord<std::uint64_t>& { return links[index]; };
  }
  void take_and_give(int count, int given_back) {
    std::vector<std::uint32_t> taken;
    for (int i = 0; i < count; ++i) {
      const std::uint32_t index = stack.pop(link_of());
      if (index == Stack::kNone) continue;
      Explorer::current()->check(++users[index] == 1, "a slot has two users");
      taken.push_back(index);
    }
    for (const std::uint32_t index : taken) {
      if (given_back-- == 0) return;
      --users[index];
      stack.push(index, link_of());
    }
  }

  Stack stack;
  std::array<ModelWord<std::uint64_t>, kSlots> links;
  std::array<int, kSlots> users{};
};

template <std::uint64_t kTagStep>
Exploration explore(std::vector<std::pair<int, int>> fibers) {
  return Explorer::explore([fibers] {
    auto run = std::make_shared<StackRun<kTagStep>>();
    Program program;
    for (const auto& [count, given_back] : fibers) {
      program.bodies.push_back([run, count = count, given_back = given_back] {
        run->take_and_give(count, given_back);
      });
    }
    program.afterwards = [run] {
      std::uint32_t free = 0, used = 0;
      while (free < 9 && run->stack.pop(run->link_of()) != UINT32_MAX) ++free;
      for (const int users : run->users) used += static_cast<std::uint32_t>(users);
      Explorer::current()->check(free + used == StackRun<kTagStep>::kSlots, "a slot is lost");
    };
    return program;
  });
}

TEST_CASE(slots_have_one_user) {
  const std::vector<std::vector<std::pair<int, int>>> cases{
      {{1, 1}, {2, 1}}, {{2, 2}, {2, 1}}, {{2, 2}, {2, 2}}, {{1, 1}, {1, 1}, {1, 0}}};
  for (const auto& fibers : cases) {
    const Exploration result = explore<1>(fibers);
    std::printf("  %zu fibers: %lld runs, %lld states\n", fibers.size(),
                static_cast<long long>(result.runs), static_cast<long long>(result.states));
    if (result.violations > 0) fail(__FILE__, __LINE__, result.first_violation);
  }
}

TEST_CASE(without_the_tag_it_breaks) {
  const Exploration result = explore<0>({{1, 1}, {2, 1}});
  CHECK(result.violations > 0);
}

}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
