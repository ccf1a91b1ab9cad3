// SPDX-License-Identifier: BSD-3-Clause
#include "base/mailbox.hpp"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace trib {
namespace {

/// What every letter begins with. Anybody may write to the socket: who does not know the secret is
/// not heard.
struct Head {
  std::uint64_t secret;
  std::int32_t from;
  std::int32_t padding;
};

constexpr std::size_t kRoomForFiles = CMSG_SPACE(Mailbox::kMostFiles * sizeof(int));

std::string describe(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

}  // namespace

std::unique_ptr<Mailbox> Mailbox::open(Bootstrap& bootstrap, std::string& why) {
  struct Introduction {
    Address address;
    std::uint64_t secret;
    char trouble[64];
  };
  const auto size = static_cast<std::size_t>(bootstrap.size());
  auto mailbox = std::unique_ptr<Mailbox>(new Mailbox(bootstrap.rank()));
  Introduction mine{};
  Address& own = mine.address;
  own.name.sun_family = AF_UNIX;
  own.length = sizeof own.name;
  std::string trouble;
  mailbox->socket_.reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int fd = mailbox->socket_.get();
  if (fd < 0)
    trouble = describe("socket");
  else if (::getrandom(&mine.secret, sizeof mine.secret, 0) !=
           static_cast<ssize_t>(sizeof mine.secret))
    trouble = describe("getrandom");
  // Without a name, the kernel finds one that is in no folder and nobody else's.
  else if (::bind(fd, reinterpret_cast<const sockaddr*>(&own.name), sizeof(sa_family_t)) != 0 ||
           ::getsockname(fd, reinterpret_cast<sockaddr*>(&own.name), &own.length) != 0)
    trouble = describe("bind");
  std::snprintf(mine.trouble, sizeof mine.trouble, "%s", trouble.c_str());
  std::vector<Introduction> all(size);
  bootstrap.exchange(&mine, all.data(), sizeof mine);
  mailbox->secret_ = all[0].secret;
  for (const Introduction& other : all) {
    if (other.trouble[0] != '\0') {
      why = other.trouble;
      return nullptr;
    }
    mailbox->addresses_.push_back(other.address);
  }
  // Whether they are in reach: containers may have a network each. A socket that has a peer takes
  // letters from no other, so it is one of its own.
  char reaches_all = 1;
  for (const Address& address : mailbox->addresses_) {
    const File probe(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (probe.get() < 0 || ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address.name),
                                     address.length) != 0)
      reaches_all = 0;
  }
  std::vector<char> reached(size);
  bootstrap.exchange(&reaches_all, reached.data(), 1);
  if (std::find(reached.begin(), reached.end(), 0) != reached.end()) {
    why = "the ranks' sockets do not reach each other";
    return nullptr;
  }
  return mailbox;
}

Mailbox::Sent Mailbox::send(int rank, std::span<const std::byte> text, std::span<const int> files) {
  if (text.size() > kMostBytes || files.size() > kMostFiles) return Sent::never;
  Address& to = addresses_[static_cast<std::size_t>(rank)];
  Head head{secret_, rank_, 0};
  iovec parts[] = {{&head, sizeof head}, {const_cast<std::byte*>(text.data()), text.size()}};
  alignas(cmsghdr) std::array<char, kRoomForFiles> control{};
  msghdr message{};
  message.msg_name = &to.name;
  message.msg_namelen = to.length;
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!files.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(files.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(files.size_bytes());
    std::memcpy(CMSG_DATA(rights), files.data(), files.size_bytes());
  }
  while (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    // The last: too many files of this user are on their way.
    const bool is_full = errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS;
    return is_full ? Sent::later : Sent::never;
  }
  return Sent::yes;
}

std::optional<Mailbox::Letter> Mailbox::receive() {
  for (;;) {
    Head head{};
    std::array<std::byte, kMostBytes> text;
    iovec parts[] = {{&head, sizeof head}, {text.data(), text.size()}};
    alignas(cmsghdr) std::array<char, kRoomForFiles> control{};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t length = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return {};
    Letter letter;
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
         part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
        letter.files.emplace_back(fd);  // closed by all that follows
      }
    }
    const auto bytes = static_cast<std::size_t>(length);
    const bool is_known = bytes >= sizeof head && head.secret == secret_ && head.from >= 0 &&
                          static_cast<std::size_t>(head.from) < addresses_.size();
    if (!is_known) continue;
    letter.from = head.from;
    letter.text.assign(text.begin(),
                       text.begin() + static_cast<std::ptrdiff_t>(bytes - sizeof head));
    return letter;
  }
}

}  // namespace trib
