// Which of this host's addresses the other ranks are told.
//
// Threads  any. Blocks as long as the name service takes to resolve the master's name.
#pragma once

#include <string>

namespace rrfp {

// The numeric host to listen at. With `interfaces` (comma-separated names or beginnings of names of
// network interfaces), the first address of the first that matches. Else the address from
// which this host reaches `master`. Where that is a loopback address although `master` is not
// written as one (many hosts resolve their own name to 127.0.1.1), the first address that is not
// loopback.
// Empty when the host has no address. Throws UserError when no interface matches; it lists all
// addresses there are.
std::string choose_host(const std::string& master, const std::string& interfaces);

}  // namespace rrfp
