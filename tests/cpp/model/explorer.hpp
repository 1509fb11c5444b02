// Explorer: runs a small concurrent program under every interleaving of its shared accesses.
//
// The program's threads are fibers of one thread. Before each access a ModelAtomic calls
// step(), which hands control back here; the explorer then chooses who goes next, and searches
// all choices depth first by running the program again from the start with another prefix.
//
// Two interleavings that lead to the same state are continued once. The state is the enrolled
// words, how far each fiber is and what it has observed; as a fiber is deterministic, that fixes
// the rest of it. Whatever else a fiber lets its behaviour depend on, it must observe().
//
// The model is sequentially consistent: logic errors show here, weak orders under
// ThreadSanitizer. Loops end if they end in every fair run; kMaxSteps stops the others.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "check.hpp"

namespace rrfp::test {

struct Program {
  std::vector<std::function<void()>> bodies;   // one per fiber
  std::function<void()> afterwards;            // checks, when all have ended
  std::size_t dying = SIZE_MAX;                // a fiber that ends at its dies_at-th access
  std::uint64_t dies_at = 0;
};

enum class Merge {
  kEqualStates,
  kNothing,  // every interleaving to its end: to check the merging itself, on tiny programs
};

struct Exploration {
  std::int64_t runs = 0;
  std::int64_t states = 0;
  std::int64_t violations = 0;
  std::string first_violation;
};

class Explorer {
 public:
  // `make` builds the program anew, with fresh shared state, for every run.
  static Exploration explore(const std::function<Program()>& make,
                             Merge merge = Merge::kEqualStates) {
    Explorer explorer;
    explorer.merge_ = merge;
    current() = &explorer;
    do {
      explorer.run(make);
    } while (explorer.backtrack());
    current() = nullptr;
    explorer.result_.states = static_cast<std::int64_t>(explorer.visited_.size());
    return explorer.result_;
  }

  static Explorer*& current() {
    static Explorer* explorer = nullptr;
    return explorer;
  }

  // A shared word: part of the state.
  void enroll(const std::uint64_t* word) { words_.push_back(word); }

  // A point at which others may run. Outside the fibers: nothing.
  void step() {
    if (running_ == kNobody) return;
    ++fibers_[running_].steps;
    if (running_ == program_.dying && fibers_[running_].steps > program_.dies_at &&
        !fibers_[running_].ended) {
      throw Death{};
    }
    swapcontext(&fibers_[running_].context, &scheduler_);
  }

  void observe(std::uint64_t value) {
    if (running_ != kNobody) fibers_[running_].observed.push_back(value);
  }

  void check(bool holds, const char* what) {
    if (holds) return;
    if (++result_.violations == 1) result_.first_violation = what;
  }

 private:
  static constexpr std::size_t kNobody = SIZE_MAX;
  static constexpr std::size_t kStackBytes = 64 * 1024;
  static constexpr std::size_t kMaxSteps = 10000;

  struct Death {};

  struct Fiber {
    ucontext_t context{};
    std::vector<char> stack = std::vector<char>(kStackBytes);
    std::vector<std::uint64_t> observed;
    std::uint64_t steps = 0;
    bool ended = false;
  };

  struct Decision {
    std::vector<std::size_t> options;
    std::size_t taken = 0;
  };

  static void fiber_main() {
    Explorer& self = *current();
    try {
      self.program_.bodies[self.running_]();
    } catch (const Death&) {
      // Wherever it was, it does nothing more.
    }
    self.fibers_[self.running_].ended = true;
    self.step();
  }

  void run(const std::function<Program()>& make) {
    words_.clear();
    program_ = make();
    fibers_.resize(program_.bodies.size());
    for (std::size_t f = 0; f < fibers_.size(); ++f) {
      fibers_[f].observed.clear();
      fibers_[f].steps = 0;
      fibers_[f].ended = false;
      getcontext(&fibers_[f].context);
      fibers_[f].context.uc_stack.ss_sp = fibers_[f].stack.data();
      fibers_[f].context.uc_stack.ss_size = kStackBytes;
      makecontext(&fibers_[f].context, &Explorer::fiber_main, 0);
    }
    for (std::size_t f = 0; f < fibers_.size(); ++f) resume(f);  // to its first access
    bool exploring = true;
    for (std::size_t depth = 0;; ++depth) {
      const std::vector<std::size_t> options = unfinished();
      if (options.empty()) break;
      if (depth == kMaxSteps) {
        check(false, "the program does not end");
        break;
      }
      if (exploring && depth == path_.size()) {
        exploring = visited_.insert(state()).second || merge_ == Merge::kNothing;
        if (exploring) path_.push_back({options});
      }
      // A state seen before is not branched again, but run to its end so that stacks unwind.
      resume(depth < path_.size() ? path_[depth].options[path_[depth].taken] : options.front());
    }
    program_.afterwards();
    ++result_.runs;
  }

  void resume(std::size_t fiber) {
    running_ = fiber;
    swapcontext(&scheduler_, &fibers_[fiber].context);
    running_ = kNobody;
  }

  std::vector<std::size_t> unfinished() const {
    std::vector<std::size_t> options;
    for (std::size_t f = 0; f < fibers_.size(); ++f) {
      if (!fibers_[f].ended) options.push_back(f);
    }
    return options;
  }

  std::string state() const {
    std::string key;
    const auto append = [&key](std::uint64_t value) {
      char bytes[sizeof value];
      std::memcpy(bytes, &value, sizeof value);
      key.append(bytes, sizeof value);
    };
    for (std::size_t w = 0; w < words_.size(); ++w) {
      if (*words_[w] == 0) continue;
      append(w);
      append(*words_[w]);
    }
    for (const Fiber& fiber : fibers_) {
      append(UINT64_MAX);
      append(fiber.steps);
      for (const std::uint64_t value : fiber.observed) append(value);
    }
    return key;
  }

  // To the next untried choice. False: there is none.
  bool backtrack() {
    while (!path_.empty() && ++path_.back().taken == path_.back().options.size()) path_.pop_back();
    return !path_.empty();
  }

  Merge merge_ = Merge::kEqualStates;
  Program program_;
  std::vector<Fiber> fibers_;
  std::vector<const std::uint64_t*> words_;
  std::vector<Decision> path_;
  std::unordered_set<std::string> visited_;
  ucontext_t scheduler_{};
  std::size_t running_ = kNobody;
  Exploration result_;
};

// main() of a model program. ThreadSanitizer does not follow fibers (it runs out of memory),
// and has nothing to find in one thread.
inline int run_model(int argc, char** argv) {
#if defined(__SANITIZE_THREAD__)
  (void)argc;
  std::printf("%s: skipped, the explorer does not run under ThreadSanitizer\n", argv[0]);
  return 0;
#else
  return run(argc, argv);
#endif
}

}  // namespace rrfp::test
