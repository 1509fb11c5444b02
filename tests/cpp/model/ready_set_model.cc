// Every interleaving of small cases of ReadySet: no task lost, none claimed twice, and head()
// finds a task once its arrive() has returned.
#include <set>

#include "check.hpp"
#include "model/ready_set_cases.hpp"

namespace rrfp::test {
namespace {

// The explorer itself: n fibers of k steps have (nk)! / k!^n interleavings. Here the fibers
// observe who went before them, so that no two interleavings share a state.
TEST_CASE(the_explorer_visits_every_interleaving) {
  std::set<std::string> seen;
  Explorer::explore([&seen] {
    auto trail = std::make_shared<std::string>();
    Program program;
    for (const char name : {'a', 'b', 'c'}) {
      program.bodies.push_back([trail, name] {
        for (int step = 0; step < 2; ++step) {
          Explorer::current()->step();
          trail->push_back(name);
          Explorer::current()->observe(std::hash<std::string>{}(*trail));
        }
      });
    }
    program.afterwards = [trail, &seen] { seen.insert(*trail); };
    return program;
  });
  CHECK(seen.size() == 90);  // 6! / 2!^3
}

// What the fibers may see is the same whether equal states are continued once or each time.
TEST_CASE(merging_equal_states_loses_no_outcome) {
  std::set<std::string> outcomes[2];
  std::int64_t runs[2];
  for (const Merge merge : {Merge::kEqualStates, Merge::kNothing}) {
    auto& into = outcomes[merge == Merge::kNothing];
    runs[merge == Merge::kNothing] = Explorer::explore([&into] {
      struct Shared {
        ModelAtomic<std::uint64_t> x, y;
        std::string saw[3];
      };
      auto shared = std::make_shared<Shared>();
      Program program;
      for (int f = 0; f < 3; ++f) {
        program.bodies.push_back([shared, f] {
          const auto order = std::memory_order_relaxed;
          std::string& saw = shared->saw[f];
          saw += std::to_string(shared->x.fetch_or(1u << f, order));
          saw += std::to_string(shared->y.load(order));
          if (saw.back() == '0') shared->y.fetch_or(4u >> f, order);
          saw += std::to_string(shared->x.fetch_and(f, order));
        });
      }
      program.afterwards = [shared, &into] {
        into.insert(shared->saw[0] + " " + shared->saw[1] + " " + shared->saw[2]);
      };
      return program;
    }, merge).runs;
  }
  CHECK(outcomes[0].size() > 20);
  CHECK(outcomes[0] == outcomes[1]);
  CHECK(runs[0] < runs[1]);
}

TEST_CASE(ready_set_holds_in_every_interleaving) {
  for (const ReadySetCase& of : ready_set_cases()) {
    const Exploration result = explore_ready_set<ReadySteps<ModelAtomic>>(of);
    std::printf("  %-40s %8lld states %8lld runs\n", of.name,
                static_cast<long long>(result.states), static_cast<long long>(result.runs));
    CHECK(result.states > 20);
    if (result.violations != 0) {
      fail(__FILE__, __LINE__, std::string(of.name) + ": " + result.first_violation);
    }
  }
}

}  // namespace
}  // namespace rrfp::test

int main(int argc, char** argv) { return rrfp::test::run_model(argc, argv); }
