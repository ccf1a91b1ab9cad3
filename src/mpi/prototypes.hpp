// SPDX-License-Identifier: BSD-3-Clause
// The functions, besides reductions, whose buffers may be on a device: staging.cpp reads here what
// their arguments are. CMakeLists.txt exports those that the MPI declares, with and without _c.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

// Name, number of arguments, and a letter for each:
//
//   s, r   buffer that is read (sent), written (received)
//   b      both; of a rooted call: read at the root, written elsewhere
//   S, R   buffer with a part for every rank; of a rooted call: significant at the root only
//   n, N   count; counts for all parts
//   d, D   displacements for all parts, in elements, in bytes; A: in bytes, as addresses
//   t, T   type; types for all parts
//   g      one part, written at the root; a: all parts that are to be reduced and scattered
//   @      root
//   p, .   rank, tag: the call is a message
//   c      communicator; C: one with a topology, whose neighbours, not all ranks, have the parts
//   x      status
//   q, Q   the request that comes out: nonblocking, persistent
//   m, o, i   message, operator, info
//   k, K   packed form that is read, written
//   z, y   its bytes, the position in it; if there is e, its representation, these are addresses
//
// A count and a type follow the buffers that they are for, but for packed forms.

// clang-format off
#define TRIB_STAGED(X)                           \
  X(Send, 6, "sntp.c")                           \
  X(Bsend, 6, "sntp.c")                          \
  X(Ssend, 6, "sntp.c")                          \
  X(Rsend, 6, "sntp.c")                          \
  X(Recv, 7, "rntp.cx")                          \
  X(Mrecv, 5, "rntmx")                           \
  X(Sendrecv, 12, "sntp.rntp.cx")                \
  X(Sendrecv_replace, 9, "bntp.p.cx")            \
  X(Isend, 7, "sntp.cq")                         \
  X(Ibsend, 7, "sntp.cq")                        \
  X(Issend, 7, "sntp.cq")                        \
  X(Irsend, 7, "sntp.cq")                        \
  X(Irecv, 7, "rntp.cq")                         \
  X(Imrecv, 5, "rntmq")                          \
  X(Isendrecv, 12, "sntp.rntp.cq")               \
  X(Isendrecv_replace, 9, "bntp.p.cq")           \
  X(Send_init, 7, "sntp.cQ")                     \
  X(Bsend_init, 7, "sntp.cQ")                    \
  X(Ssend_init, 7, "sntp.cQ")                    \
  X(Rsend_init, 7, "sntp.cQ")                    \
  X(Recv_init, 7, "rntp.cQ")                     \
  X(Bcast, 5, "bnt@c")                           \
  X(Gather, 8, "sntRnt@c")                       \
  X(Gatherv, 9, "sntRNdt@c")                     \
  X(Scatter, 8, "Sntrnt@c")                      \
  X(Scatterv, 9, "SNdtrnt@c")                    \
  X(Allgather, 7, "sntRntc")                     \
  X(Allgatherv, 8, "sntRNdtc")                   \
  X(Alltoall, 7, "SntRntc")                      \
  X(Alltoallv, 9, "SNdtRNdtc")                   \
  X(Alltoallw, 9, "SNDTRNDTc")                   \
  X(Scan, 6, "srntoc")                           \
  X(Exscan, 6, "sbntoc")                         \
  X(Reduce_local, 5, "sbnto")                    \
  X(Ibcast, 6, "bnt@cq")                         \
  X(Igather, 9, "sntRnt@cq")                     \
  X(Igatherv, 10, "sntRNdt@cq")                  \
  X(Iscatter, 9, "Sntrnt@cq")                    \
  X(Iscatterv, 10, "SNdtrnt@cq")                 \
  X(Iallgather, 8, "sntRntcq")                   \
  X(Iallgatherv, 9, "sntRNdtcq")                 \
  X(Ialltoall, 8, "SntRntcq")                    \
  X(Ialltoallv, 10, "SNdtRNdtcq")                \
  X(Ialltoallw, 10, "SNDTRNDTcq")                \
  X(Iscan, 7, "srntocq")                         \
  X(Iexscan, 7, "sbntocq")                       \
  X(Bcast_init, 7, "bnt@ciQ")                    \
  X(Gather_init, 10, "sntRnt@ciQ")               \
  X(Gatherv_init, 11, "sntRNdt@ciQ")             \
  X(Scatter_init, 10, "Sntrnt@ciQ")              \
  X(Scatterv_init, 11, "SNdtrnt@ciQ")            \
  X(Allgather_init, 9, "sntRntciQ")              \
  X(Allgatherv_init, 10, "sntRNdtciQ")           \
  X(Alltoall_init, 9, "SntRntciQ")               \
  X(Alltoallv_init, 11, "SNdtRNdtciQ")           \
  X(Alltoallw_init, 11, "SNDTRNDTciQ")           \
  X(Scan_init, 8, "srntociQ")                    \
  X(Exscan_init, 8, "sbntociQ")                  \
  X(Neighbor_allgather, 7, "sntRntC")            \
  X(Neighbor_allgatherv, 8, "sntRNdtC")          \
  X(Neighbor_alltoall, 7, "SntRntC")             \
  X(Neighbor_alltoallv, 9, "SNdtRNdtC")          \
  X(Neighbor_alltoallw, 9, "SNATRNATC")          \
  X(Ineighbor_allgather, 8, "sntRntCq")          \
  X(Ineighbor_allgatherv, 9, "sntRNdtCq")        \
  X(Ineighbor_alltoall, 8, "SntRntCq")           \
  X(Ineighbor_alltoallv, 10, "SNdtRNdtCq")       \
  X(Ineighbor_alltoallw, 10, "SNATRNATCq")       \
  X(Neighbor_allgather_init, 9, "sntRntCiQ")     \
  X(Neighbor_allgatherv_init, 10, "sntRNdtCiQ")  \
  X(Neighbor_alltoall_init, 9, "SntRntCiQ")      \
  X(Neighbor_alltoallv_init, 11, "SNdtRNdtCiQ")  \
  X(Neighbor_alltoallw_init, 11, "SNATRNATCiQ")  \
  X(Pack, 7, "sntKzyc")                          \
  X(Unpack, 7, "kzyrntc")                        \
  X(Pack_external, 7, "esntKzy")                 \
  X(Unpack_external, 7, "ekzyrnt")
// clang-format on

namespace trib::mpi {

/// What the arguments of a function are, as above. May stand among template arguments.
struct Prototype {
  static constexpr std::size_t kMost = 12;
  char letters[kMost + 1] = {};

  template <std::size_t N>
  consteval Prototype(const char (&text)[N]) {  // NOLINT: a literal is meant as one
    static_assert(N <= kMost + 1);
    std::copy_n(text, N, letters);
  }
  constexpr std::string_view text() const { return letters; }
  constexpr bool has(char letter) const { return text().find(letter) != text().npos; }
  constexpr std::size_t at(char letter) const { return text().find(letter); }

  constexpr bool has_communicator() const { return has('c') || has('C'); }
  constexpr std::size_t communicator() const { return text().find_first_of("cC"); }

  constexpr bool is_message() const { return has('.') || has('m'); }
  constexpr bool is_packing() const { return has('k') || has('K'); }
  constexpr bool is_blocking_collective() const {
    return has_communicator() && !is_message() && !is_packing() && !has('q') && !has('Q');
  }
};

}  // namespace trib::mpi
