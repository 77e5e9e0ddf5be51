package specdraft_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"example.com/specdraft/clients/go/internal/fakedrafter"
	"example.com/specdraft/clients/go/specdraft"
)

// scripted is the address of a service whose every draft is token 7.
func scripted() (string, func()) {
	service, err := fakedrafter.Start(fakedrafter.Options{HostMemory: true})
	if err != nil {
		log.Fatal(err)
	}
	return service.Target(), service.Close
}

// hiddens stand in for a target's: n rows.
func hiddens(n, width int) specdraft.Rows {
	return specdraft.Float32Rows(make([]float32, n*width), width)
}

func Example() {
	target, stop := scripted()
	defer stop()
	ctx := context.Background()
	client, err := specdraft.Dial(ctx, target)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	sequence, err := session.OpenSequence(ctx, specdraft.SequenceOptions{})
	if err != nil {
		log.Fatal(err)
	}
	prompt := []uint32{11, 42, 7, 99} // t_0 .. t_3; the target is fed them and chooses t_4 = 5
	rows := hiddens(len(prompt), session.HiddenWidth())
	if _, err := sequence.Prefill(ctx, prompt, rows); err != nil {
		log.Fatal(err)
	}
	position := int64(len(prompt))
	pairs := specdraft.Pairs{FirstKey: position - 1, Tokens: []uint32{5}, Hiddens: rows.Slice(3, 4)}
	for range 2 {
		proposal, err := sequence.Propose(ctx, pairs, specdraft.Draft{Count: 3})
		if err != nil {
			log.Fatal(err)
		}
		// The target verifies [t_P, drafts...] in one forward; here it accepts two of them and goes on with token 17.
		verified := hiddens(1+len(proposal.Drafts), session.HiddenWidth())
		pairs, position, err = specdraft.NextPairs(position, proposal.Drafts, 2, 17, verified)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(proposal.Drafts, "->", pairs.Tokens, "fed", position)
	}
	// Output:
	// [7 7 7] -> [7 7 17] fed 7
	// [7 7 7] -> [7 7 17] fed 10
}

func ExampleError() {
	target, stop := scripted()
	defer stop()
	ctx := context.Background()
	client, err := specdraft.Dial(ctx, target, specdraft.WithTimeout(2*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	_, err = client.OpenSession(ctx, specdraft.SessionOptions{HiddenWidth: 4095})
	var failed *specdraft.Error
	fmt.Println(errors.Is(err, specdraft.ReasonHandshakeMismatch), errors.As(err, &failed), failed.Code)
	// Output: true true FailedPrecondition
}

func ExampleSession_ProposeBatch() {
	target, stop := scripted()
	defer stop()
	ctx := context.Background()
	client, err := specdraft.Dial(ctx, target)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{Slots: 2})
	if err != nil {
		log.Fatal(err)
	}
	var items []specdraft.ProposeItem
	for _, key := range []int64{0, 9} { // the second leaves a gap
		sequence, err := session.OpenSequence(ctx, specdraft.SequenceOptions{})
		if err != nil {
			log.Fatal(err)
		}
		pairs := specdraft.Pairs{FirstKey: key, Tokens: []uint32{1}, Hiddens: hiddens(1, session.HiddenWidth())}
		items = append(items, specdraft.ProposeItem{Sequence: sequence, Pairs: pairs, Draft: specdraft.Draft{Count: 2}})
	}
	results, err := session.ProposeBatch(ctx, items)
	if err != nil {
		log.Fatal(err)
	}
	for _, result := range results {
		if result.Err != nil {
			fmt.Println("no drafts:", errors.Is(result.Err, specdraft.ReasonMissingRows))
			continue
		}
		fmt.Println(result.Proposal.Drafts)
	}
	// Output:
	// [7 7]
	// no drafts: true
}

func ExampleSession_Resume() {
	target, stop := scripted()
	defer stop()
	ctx := context.Background()
	client, err := specdraft.Dial(ctx, target)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	sequence, err := session.OpenSequence(ctx, specdraft.SequenceOptions{})
	if err != nil {
		log.Fatal(err)
	}
	tokens := []uint32{11, 42, 7, 99, 5}
	if _, err := sequence.Prefill(ctx, tokens, hiddens(len(tokens), session.HiddenWidth())); err != nil {
		log.Fatal(err)
	}
	if _, err := session.Park(ctx, sequence, tokens, "chat-17"); err != nil {
		log.Fatal(err)
	}
	next := append(tokens, 8, 3) // the next turn's prompt
	resumed, err := session.Resume(ctx, next, specdraft.ResumeOptions{Conversation: "chat-17"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(resumed.KeysKept, "rows kept, write the pairs from", resumed.NextKey)
	// Output: 4 rows kept, write the pairs from 4
}
