// What the messages of simulated ranks carry: what they are, so that a rank can tell what its
// tasks were given, and behind it a filler, so that their sizes differ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "comm/message.hpp"
#include "runtime/stage_graph.hpp"

namespace rrfp::test {

struct Content {
  std::uint32_t step;
  std::int32_t source_stage, target_stage, microbatch;
  TaskKind kind;
  bool operator==(const Content&) const = default;
};

// The sizes and bytes of fillers are functions of the content.
inline std::vector<std::byte> filler_of(const Content& content) {
  std::uint32_t mixed = content.step * 31 + static_cast<std::uint32_t>(content.microbatch) * 7919 +
                        static_cast<std::uint32_t>(content.source_stage) * 104729;
  mixed ^= mixed >> 7;
  const std::size_t num_bytes = mixed % 5 == 0 ? 0 : mixed % (mixed % 11 == 0 ? 20000 : 300);
  return {num_bytes, static_cast<std::byte>(mixed)};
}

struct Output {
  Content content;
  std::vector<std::byte> filler;
};

inline OutboundMessage* make_output(std::uint32_t step, const Task& task, std::int32_t stage) {
  const Content content{step, task.stage, stage, task.microbatch, task.kind};
  auto* output = new Output{content, filler_of(content)};
  auto* message = new OutboundMessage;
  message->owner = output;
  message->segments = {{reinterpret_cast<const std::byte*>(&output->content), sizeof content}};
  if (!output->filler.empty()) {
    message->segments.push_back({output->filler.data(), output->filler.size()});
  }
  return message;
}

inline void free_output(OutboundMessage* message) {
  delete static_cast<Output*>(message->owner);
  delete message;
}

// Whether the message is this content with its own filler.
inline bool carries(const InboundMessage* message, const Content& content) {
  const std::vector<std::byte> filler = filler_of(content);
  const std::uint64_t filler_at = padded_bytes(sizeof content);
  if (message == nullptr || message->payload == nullptr ||
      message->header.payload_bytes != filler_at + padded_bytes(filler.size())) {
    return false;
  }
  Content carried{};
  std::memcpy(&carried, message->payload, sizeof carried);
  return carried == content &&
         std::equal(filler.begin(), filler.end(), message->payload + filler_at);
}

// Empty when the inputs are those that the graph says: own F or I first, then by stage.
inline std::string wrong_inputs(const StageGraph& graph, std::uint32_t step, const Task& task,
                                const std::vector<InboundMessage*>& inputs) {
  const bool is_forward = task.kind == TaskKind::kForward;
  std::vector<std::int32_t> senders;
  if (is_forward) senders = graph.sources_of(task.stage);
  if (!is_forward && task.kind != TaskKind::kWeightGrad) senders = graph.consumers_of(task.stage);
  const std::size_t num_own = is_forward ? 0 : 1;
  if (inputs.size() != num_own + senders.size()) {
    return to_text(task) + " got " + std::to_string(inputs.size()) + " inputs";
  }
  for (std::size_t i = 0; i < senders.size(); ++i) {
    const Content meant{step, senders[i], task.stage, task.microbatch, task.kind};
    if (carries(inputs[num_own + i], meant)) continue;
    return to_text(task) + " of step " + std::to_string(step) + " was given another input";
  }
  return "";
}

}  // namespace rrfp::test
