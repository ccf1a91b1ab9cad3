// SPDX-License-Identifier: BSD-3-Clause
// The benchmark behind `trib bench`: an ordinary MPI program, built once per MPI ABI. In one job it
// times Tributary, which serves MPI_X by the preload library, against PMPI_X, the MPI's own, and on
// GPU buffers against NCCL, and prints one JSON object per line on rank 0.
// python/tributary/cli/bench.py starts it and makes tables of what it says; bench_options.hpp has
// what can be asked for, bench_setup.hpp what is compared, pattern.hpp makes and checks the data.
//
// How a point is measured (bench_measure.cpp):
//   - All sides run interleaved: `repeats` times a batch of each; they take turns in going first.
//   - Before every timed call all ranks wait for each other, for every collective and all sides, so
//     that all see the same arrival pattern and no call overlaps the one before (a Reduce, or it
//     would be the pipelining that is timed). On one node they then start at a moment that the
//     latest of them has named, by the clock that they share, since a barrier lets ranks go one
//     after the other, and the time between would be part of every short call. (Hunold and
//     Carpen-Amarie, Reproducible MPI Benchmarking Is Still Not as Easy as You Think, 2016, have
//     windows on synchronised clocks for the same reason.) --start barrier: by the MPI's barrier.
//   - With --burst that many calls follow each other in a row, and the time is theirs over their
//     number: what IMB does.
//   - A call's time is that of its slowest rank: the ranks' times are combined after the batch,
//     never inside it.
//   - A batch gives its median over calls. Nothing is subtracted; reading the clock costs all
//     sides the same 20 to 30 ns.
//   - Results are compared with a reference before the first and after the last batch of each
//     side: all elements, on the host.
//
// On GPU buffers a call ends when its result may be used:
//   - Tributary: MPI_X on device pointers. NCCL: enqueue, and synchronise the stream. The MPI's
//     own: PMPI_X with the copies between GPU and page-locked host memory that its users have to
//     write, unless the MPI takes device pointers itself (--mpi-gpu-aware).
//   - In stream mode what is timed, with a start before and a synchronisation after, is a burst
//     of operations back to back on one stream; in graph mode, the replay of a graph of such a
//     burst. Times are of one operation: the burst's over their number.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>

#include "bench_measure.hpp"

namespace {

/// For `trib run`: whether a launcher and an MPI library make one job together, or a job of one
/// rank per process.
int probe() {
  int rank = 0, size = 1;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank == 0)
    std::printf("ranks %d library %s\n", size, trib::bench::file_of("PMPI_Init").c_str());
  return MPI_Finalize();
}

void measure(int argc, char** argv) {
  const trib::bench::World world;
  trib::bench::Options options;
  world.together([&] { options = trib::bench::read_options(argc, argv); });
  trib::bench::Setup setup(world, options);
  trib::bench::Measurement measurement(world, options, setup);
  for (const trib::bench::Collective collective : options.collectives) measurement.run(collective);
  setup.finish();
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc == 2 && std::strcmp(argv[1], "probe") == 0) return probe();
  PMPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  int rank = 0, status = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    measure(argc, argv);
  } catch (const trib::bench::SetupFailed& failed) {
    // All ranks are here: the job ends in order, and its reader gets the reason.
    if (rank == 0) trib::bench::say({{"type", "error"}, {"text", failed.what()}});
    status = 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trib-bench: rank %d: %s\n", rank, error.what());
    status = 1;
    // MPICH's mpiexec drops what it has not yet passed on when a rank aborts.
    usleep(300000);
    MPI_Abort(MPI_COMM_WORLD, status);
  }
  MPI_Finalize();
  return status;
}
