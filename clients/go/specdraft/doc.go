// Package specdraft is the Go client of specdraft, a gRPC service that does the drafting half of speculative decoding: it
// holds a draft head (an MTP layer, for example) and its KV, and proposes the next tokens while your engine keeps the
// target model.
//
// # Words
//
// t_i is token i of a sequence, h_i the target's hidden state for it. Pair k is (t_{k+1}, h_k). P is the number of tokens
// that the target has been fed, so the newest pair is P-1. Everything is one operation: write pairs at a first key; rows
// with that key and above are dropped first. NextPairs turns the outcome of a verify into the pairs of the next round.
//
// # Use
//
// Dial connects, Client.OpenSession opens a lease that keeps itself alive, Session.OpenSequence opens a sequence.
// Sequence.Prefill writes a prompt, Sequence.Propose the pairs of each verify, and drafts. Session.ProposeBatch drafts for
// many sequences in one forward. Session.Park and Session.Resume keep the rows between the turns of a conversation.
//
// Everything is safe for concurrent use; the methods of one sequence take turns. Every RPC has a deadline (WithTimeout),
// and a context that ends earlier wins.
//
// # Failures
//
// Errors are *Error: errors.Is compares with a Reason or a Code, errors.As gives the figures. A target never has to fail
// because drafting did: it goes on without drafts, and where the hidden states of a round are gone by then, the next write
// says AllowGap.
//
// Calls go over one Drive stream. Where it breaks, it attaches again within the service's grace period and sends what is
// unanswered once more; operation numbers see to it that nothing is done twice. After a deadline or a cancelled context
// the next use of the sequence first asks the service where it stands. When the service has lost the session (it
// restarted), sequences answer SESSION_UNKNOWN and the next OpenSequence opens a new session by itself.
//
// # Memory
//
// On the same host hidden rows go through shared memory, elsewhere inside the messages. Package cuda lets them go through
// a GPU's memory, without cgo.
package specdraft
