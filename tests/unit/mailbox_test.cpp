// SPDX-License-Identifier: BSD-3-Clause
// Letters with open files: what arrives, in which order, and what does not.
#include "base/mailbox.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "support/thread_ranks.hpp"

namespace trib {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_of(const Mailbox::Letter& letter) {
  return {reinterpret_cast<const char*>(letter.text.data()), letter.text.size()};
}

File file_with(const std::string& content) {
  File file(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(file.get(), content.data(), content.size()),
            static_cast<ssize_t>(content.size()));
  return file;
}

std::string content_of(const File& file) {
  char content[64] = {};
  EXPECT_GE(::pread(file.get(), content, sizeof content - 1, 0), 0);
  return content;
}

std::size_t open_files() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

/// Runs `body` as each of `size` ranks, with a mailbox each. Nobody leaves before all are through.
void run_with_mailboxes(int size, const std::function<void(int, Mailbox&, Bootstrap&)>& body) {
  const auto errors = test::run_ranks(size, [&](int rank, std::unique_ptr<Bootstrap> bootstrap) {
    std::string why;
    const auto mailbox = Mailbox::open(*bootstrap, why);
    ASSERT_NE(mailbox, nullptr) << why;
    body(rank, *mailbox, *bootstrap);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

void meet(Bootstrap& bootstrap) {
  std::vector<char> all(static_cast<std::size_t>(bootstrap.size()));
  const char mine = 0;
  bootstrap.exchange(&mine, all.data(), 1);
}

TEST(Mailbox, FilesArriveWithTheirText) {
  const std::size_t before = open_files();
  run_with_mailboxes(3, [](int rank, Mailbox& mailbox, Bootstrap& bootstrap) {
    for (int to = 0; to < 3; ++to) {
      const std::string name = std::to_string(rank) + " to " + std::to_string(to);
      const File one = file_with("first, " + name), other = file_with("second, " + name);
      const int files[] = {one.get(), other.get()};
      EXPECT_EQ(mailbox.send(to, bytes_of(name), files), Mailbox::Sent::yes);
    }
    meet(bootstrap);
    std::vector<bool> has_come(3);
    for (int i = 0; i < 3; ++i) {
      const auto letter = mailbox.receive();
      ASSERT_TRUE(letter);
      const std::string name = std::to_string(letter->from) + " to " + std::to_string(rank);
      has_come[static_cast<std::size_t>(letter->from)] = true;
      EXPECT_EQ(text_of(*letter), name);
      ASSERT_EQ(letter->files.size(), 2u);
      EXPECT_EQ(content_of(letter->files[0]), "first, " + name);
      EXPECT_EQ(content_of(letter->files[1]), "second, " + name);
      EXPECT_NE(::fcntl(letter->files[0].get(), F_GETFD) & FD_CLOEXEC, 0);
    }
    EXPECT_EQ(has_come, std::vector<bool>(3, true));
    EXPECT_FALSE(mailbox.receive());
  });
  EXPECT_EQ(open_files(), before);
}

TEST(Mailbox, AFullOneIsToldFromALostOneAndKeepsTheOrder) {
  run_with_mailboxes(2, [](int rank, Mailbox& mailbox, Bootstrap& bootstrap) {
    int sent = 0, received = 0;
    for (int round = 0; round < 3; ++round) {
      if (rank == 0) {
        const File file = file_with("x");
        const int files[] = {file.get()};
        while (mailbox.send(1, bytes_of(std::to_string(sent)), files) == Mailbox::Sent::yes) {
          ++sent;
          ASSERT_LT(sent, 100000);
        }
        EXPECT_EQ(mailbox.send(1, {}, {}), Mailbox::Sent::later);
      }
      meet(bootstrap);
      if (rank == 1) {
        while (const auto letter = mailbox.receive())
          EXPECT_EQ(text_of(*letter), std::to_string(received++));
      }
      meet(bootstrap);
    }
    if (rank == 1) {
      EXPECT_GE(received, 3);
    }
  });
}

TEST(Mailbox, TheLongestAndTheShortest) {
  run_with_mailboxes(2, [](int rank, Mailbox& mailbox, Bootstrap& bootstrap) {
    const std::string longest(Mailbox::kMostBytes, 'l');
    const File file = file_with("many");
    const std::vector<int> files(Mailbox::kMostFiles, file.get());
    if (rank == 0) {
      EXPECT_EQ(mailbox.send(1, bytes_of(longest), files), Mailbox::Sent::yes);
      EXPECT_EQ(mailbox.send(1, {}, {}), Mailbox::Sent::yes);
      EXPECT_EQ(mailbox.send(1, bytes_of(longest + 'l'), {}), Mailbox::Sent::never);
      const std::vector<int> more(Mailbox::kMostFiles + 1, file.get());
      EXPECT_EQ(mailbox.send(1, {}, more), Mailbox::Sent::never);
      const int closed[] = {-1};
      EXPECT_EQ(mailbox.send(1, {}, closed), Mailbox::Sent::never);
    }
    meet(bootstrap);
    if (rank == 0) return;
    auto letter = mailbox.receive();
    ASSERT_TRUE(letter);
    EXPECT_EQ(text_of(*letter), longest);
    ASSERT_EQ(letter->files.size(), Mailbox::kMostFiles);
    EXPECT_EQ(content_of(letter->files.back()), "many");
    letter = mailbox.receive();
    ASSERT_TRUE(letter);
    EXPECT_TRUE(letter->text.empty());
    EXPECT_TRUE(letter->files.empty());
    EXPECT_FALSE(mailbox.receive());
  });
}

TEST(Mailbox, StrangersAreNotHeard) {
  run_with_mailboxes(2, [](int rank, Mailbox& mailbox, Bootstrap& bootstrap) {
    // Another group of the same ranks: its letters look alike, but for the secret.
    std::string why;
    const auto other = Mailbox::open(bootstrap, why);
    ASSERT_NE(other, nullptr) << why;
    if (rank == 0) {
      // Whoever reads /proc/net/unix can write to everyone. This test, to sockets of its own.
      const File stranger(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
      int written = 0;
      for (int fd = 0; fd < 1024; ++fd) {
        sockaddr_un name{};
        socklen_t length = sizeof name;
        if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &length) != 0 ||
            name.sun_family != AF_UNIX || length <= sizeof(sa_family_t) || name.sun_path[0] != 0)
          continue;
        const char text[64] = {};
        if (::sendto(stranger.get(), text, sizeof text, MSG_DONTWAIT,
                     reinterpret_cast<const sockaddr*>(&name), length) > 0)
          ++written;
      }
      EXPECT_GE(written, 4);  // two groups of two
      EXPECT_EQ(mailbox.send(1, bytes_of("known"), {}), Mailbox::Sent::yes);
    }
    meet(bootstrap);
    if (rank == 1) {
      const auto letter = mailbox.receive();
      ASSERT_TRUE(letter);
      EXPECT_EQ(text_of(*letter), "known");
      EXPECT_FALSE(mailbox.receive());
      EXPECT_FALSE(other->receive());
    }
    meet(bootstrap);
  });
}

TEST(Mailbox, ToAProcessThatIsGone) {
  int ready[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ready), 0);
  /// Over a pair of sockets.
  class PairBootstrap final : public Bootstrap {
   public:
    PairBootstrap(int rank, int fd) : rank_(rank), fd_(fd) {}
    int rank() const override { return rank_; }
    int size() const override { return 2; }
    void exchange(const void* mine, void* all, std::size_t bytes) override {
      const auto at = [&](int rank) {
        return static_cast<char*>(all) + static_cast<std::size_t>(rank) * bytes;
      };
      std::memcpy(at(rank_), mine, bytes);
      EXPECT_EQ(::send(fd_, mine, bytes, 0), static_cast<ssize_t>(bytes));
      EXPECT_EQ(::recv(fd_, at(1 - rank_), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
    }
    void progress() override {}

   private:
    const int rank_, fd_;
  };
  std::string why;
  const pid_t child = ::fork();
  if (child == 0) {
    PairBootstrap bootstrap(1, ready[1]);
    const auto mailbox = Mailbox::open(bootstrap, why);
    meet(bootstrap);
    const auto letter = mailbox ? mailbox->receive() : std::nullopt;
    ::_exit(letter && content_of(letter->files.at(0)) == "from the parent" ? 0 : 1);
  }
  PairBootstrap bootstrap(0, ready[0]);
  const auto mailbox = Mailbox::open(bootstrap, why);
  ASSERT_NE(mailbox, nullptr) << why;
  {
    const File file = file_with("from the parent");
    const int files[] = {file.get()};
    EXPECT_EQ(mailbox->send(1, bytes_of("text"), files), Mailbox::Sent::yes);
  }
  meet(bootstrap);
  int status = 1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(mailbox->send(1, bytes_of("text"), {}), Mailbox::Sent::never);
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace trib
