// SPDX-License-Identifier: BSD-3-Clause
// Letters between the ranks of one machine that open files go along with: shared memory cannot
// carry these.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/bootstrap.hpp"
#include "base/file.hpp"

namespace trib {

class Mailbox {
 public:
  /// Of bytes, and of files, in a letter.
  static constexpr std::size_t kMostBytes = 4096, kMostFiles = 64;

  /// Collective. Null on all ranks alike where ranks cannot write to each other: `why` says what
  /// was missing. Letters come from these ranks alone.
  static std::unique_ptr<Mailbox> open(Bootstrap& bootstrap, std::string& why);

  enum class Sent : std::uint8_t {
    yes,
    later,  ///< the other rank has too many that it has not looked at
    never,  ///< it cannot be reached
  };
  /// Never waits.
  Sent send(int rank, std::span<const std::byte> text, std::span<const int> files);

  struct Letter {
    int from = 0;
    std::vector<std::byte> text;
    std::vector<File> files;  ///< fewer than were sent if this process can have no more
  };
  /// The next one, if there is one. Those of a rank come in the order in which it sent them.
  std::optional<Letter> receive();

 private:
  struct Address {
    sockaddr_un name;
    socklen_t length;
  };
  explicit Mailbox(int rank) : rank_(rank) {}

  const int rank_;
  File socket_;
  std::vector<Address> addresses_;  // by rank
  std::uint64_t secret_ = 0;        // of these ranks
};

}  // namespace trib
