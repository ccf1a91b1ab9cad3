// SPDX-License-Identifier: BSD-3-Clause
#include "backend/life_locks.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "support/thread_ranks.hpp"

namespace trib {
namespace {

class LifeLocksTest : public testing::TestWithParam<Config::Segment> {};

TEST_P(LifeLocksTest, AreGivenBackAtTheEndAndNotBefore) {
  test::run_ranks(3, [](int rank, const std::unique_ptr<Bootstrap>& bootstrap) {
    const auto meet = [&] {
      char mine = 0, all[3];
      bootstrap->exchange(&mine, all, 1);
    };
    auto locks = LifeLocks::open(*bootstrap, GetParam());
    ASSERT_NE(locks, nullptr);
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(peer != rank && locks->is_gone(peer), false);
    // Descriptors that a program closes make nobody dead.
    meet();
    if (rank == 2)
      for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code error;
        const std::string leads_to = std::filesystem::read_symlink(entry, error);
        if (leads_to.find("tributary") != leads_to.npos)
          ::close(std::stoi(entry.path().filename()));
      }
    meet();
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(peer != rank && locks->is_gone(peer), false);
    if (rank == 2) locks = nullptr;
    meet();
    locks = LifeLocks::open(*bootstrap, GetParam());
    ASSERT_NE(locks, nullptr);
    meet();
    // A child of the program's does not go on holding them.
    pid_t child = -1;
    if (rank == 1) {
      int ready[2];
      ASSERT_EQ(::pipe(ready), 0);
      child = ::fork();
      if (child == 0) {
        if (::write(ready[1], "x", 1) != 1) ::_exit(1);
        for (;;) ::pause();
      }
      char byte = 0;
      EXPECT_EQ(::read(ready[0], &byte, 1), 1);
      ::close(ready[0]);
      ::close(ready[1]);
      locks = nullptr;
    }
    meet();
    if (rank != 1) {
      EXPECT_TRUE(locks->is_gone(1));
      EXPECT_FALSE(locks->is_gone(2 - rank));
    }
    meet();
    if (rank == 1) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(InFiles, LifeLocksTest,
                         testing::Values(Config::Segment::memfd, Config::Segment::file));

}  // namespace
}  // namespace trib
