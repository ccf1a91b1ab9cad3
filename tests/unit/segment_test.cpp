// SPDX-License-Identifier: BSD-3-Clause
// Segments that cannot be had, and files in /dev/shm that take the place of those without names:
// which are removed, and which stay.
#include "backend/segment.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "support/thread_ranks.hpp"

namespace trib {
namespace {

constexpr std::size_t kBytes = 16 << 10;

/// A segment of three ranks, each of which sees what the others write. Returns "" or what is wrong.
std::string use_segment(Config::Segment mode) {
  std::string trouble;
  test::run_ranks(3, [&](int rank, const std::unique_ptr<Bootstrap>& bootstrap) {
    std::string why;
    const auto segment = Segment::open(*bootstrap, kBytes, mode, why);
    if (rank == 0 && !segment) trouble = why;
    if (!segment) return;
    std::memset(segment->of(rank), rank + 1, kBytes);
    int mine = 0, all[3];
    bootstrap->exchange(&mine, all, sizeof mine);
    for (int peer = 0; peer < 3; ++peer)
      EXPECT_EQ(segment->of(peer)[kBytes - 1], static_cast<std::byte>(peer + 1));
    bootstrap->exchange(&mine, all, sizeof mine);
  });
  return trouble;
}

bool is_there(const std::string& name) { return ::access(("/dev/shm" + name).c_str(), F_OK) == 0; }

TEST(Segment, FilesOfJobsThatWereKilledAreRemoved) {
  const std::string self = std::to_string(::getpid());
  const std::string digits = "/tributary-" + std::string(31 - self.size(), 'c') + self;
  const std::string stale = digits + "a", held = digits + "b";
  const std::string other = "/tributary-test-" + self;  // a user's own
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const int fd = ::shm_open(stale.c_str(), O_CREAT | O_RDWR, 0600);
    if (::flock(fd, LOCK_EX) != 0 || ::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const int locked = ::shm_open(held.c_str(), O_CREAT | O_RDWR, 0600);
  ASSERT_EQ(::flock(locked, LOCK_EX), 0);
  const int unrelated = ::shm_open(other.c_str(), O_CREAT | O_RDWR, 0600);

  EXPECT_EQ(use_segment(Config::Segment::file), "");
  EXPECT_TRUE(is_there(stale));  // its maker lives
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(use_segment(Config::Segment::memfd), "");
  EXPECT_TRUE(is_there(stale));
  EXPECT_EQ(use_segment(Config::Segment::file), "");
  EXPECT_FALSE(is_there(stale));
  EXPECT_TRUE(is_there(held));
  EXPECT_TRUE(is_there(other));

  ::shm_unlink(stale.c_str());
  ::shm_unlink(held.c_str());
  ::shm_unlink(other.c_str());
  for (const int fd : {locked, unrelated, ready[0], ready[1]}) ::close(fd);
}

/// ftruncate() by itself would end the process.
TEST(Segment, LimitOnTheSizesOfFiles) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  for (const auto mode :
       {Config::Segment::automatic, Config::Segment::memfd, Config::Segment::file})
    for (const std::size_t bytes : {std::size_t{0}, 2 * kBytes}) {
      const rlimit less{bytes, before.rlim_max};
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &less), 0);
      const std::string why = use_segment(mode);
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
      EXPECT_EQ(why, "ftruncate: File too large");
    }
  EXPECT_EQ(use_segment(Config::Segment::automatic), "");
}

/// Of rank 0, whose peer is gone after so many exchanges.
class LonelyBootstrap final : public Bootstrap {
 public:
  explicit LonelyBootstrap(int exchanges) : exchanges_left_(exchanges) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void exchange(const void* mine, void* all, std::size_t bytes) override {
    shown.append(static_cast<const char*>(mine), bytes);
    if (exchanges_left_-- == 0) throw Error(Code::peer, "rank 1 is gone");
    for (int rank = 0; rank < size(); ++rank)
      std::memcpy(static_cast<char*>(all) + static_cast<std::size_t>(rank) * bytes, mine, bytes);
  }
  void progress() override {}

  std::string shown;  // to the peer

 private:
  int exchanges_left_;
};

TEST(Segment, NothingIsLeftWhereAPeerIsGone) {
  const std::size_t used = Segment::used();
  for (const auto mode : {Config::Segment::memfd, Config::Segment::file})
    for (const int exchanges : {0, 1}) {
      LonelyBootstrap bootstrap(exchanges);
      std::string why;
      EXPECT_THROW(Segment::open(bootstrap, kBytes, mode, why), Error);
      EXPECT_EQ(Segment::used(), used);
      const std::size_t at = bootstrap.shown.find("/tributary-");
      ASSERT_EQ(at != std::string::npos, mode == Config::Segment::file);
      EXPECT_FALSE(mode == Config::Segment::file && is_there(bootstrap.shown.c_str() + at));
    }
}

}  // namespace
}  // namespace trib
