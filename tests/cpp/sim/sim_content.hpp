// What the messages of simulated ranks carry: what they are, so that a rank can tell what its
// tasks were given.
#pragma once

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

inline OutboundMessage* make_output(std::uint32_t step, const Task& task, std::int32_t stage) {
  auto* content = new Content{step, task.stage, stage, task.microbatch, task.kind};
  auto* message = new OutboundMessage;
  message->owner = content;
  message->segments = {{reinterpret_cast<const std::byte*>(content), sizeof *content}};
  return message;
}

inline void free_output(OutboundMessage* message) {
  delete static_cast<Content*>(message->owner);
  delete message;
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
    Content content{};
    const InboundMessage* input = inputs[num_own + i];
    if (input != nullptr && input->payload != nullptr) {
      std::memcpy(&content, input->payload, sizeof content);
    }
    if (content == Content{step, senders[i], task.stage, task.microbatch, task.kind}) continue;
    return to_text(task) + " of step " + std::to_string(step) + " was given another input";
  }
  return "";
}

}  // namespace rrfp::test
