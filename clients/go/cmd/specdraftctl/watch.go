package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const metricPrefix = "specdraft_"

// counts are the counters of drafting, as the metrics give them.
type counts struct {
	proposals, unjudged, drafts, accepted float64
	byIndex                               []float64
}

func probability(logprob float32) float64 { return math.Exp(float64(logprob)) }

// watch prints what was accepted since the line before, every few seconds.
func watch(ctx context.Context, out io.Writer, flags settings, _ []string) error {
	before, err := scrape(ctx, flags)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "%8s%8s%9s%7s   %s\n", "rounds", "drafts", "accepted", "share", "by draft"); err != nil {
		return err
	}
	for line := 0; flags.times == 0 || line < flags.times; line++ {
		timer := time.NewTimer(flags.every)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
		now, err := scrape(ctx, flags)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, now.since(before)); err != nil {
			return err
		}
		before = now
	}
	return nil
}

// since is one line. Rounds are judged by the write that follows them, so shares are of those that were told about.
func (c counts) since(before counts) string {
	proposals, drafts, accepted := c.proposals-before.proposals, c.drafts-before.drafts, c.accepted-before.accepted
	rounds := proposals - (c.unjudged - before.unjudged)
	line := fmt.Sprintf("%8.0f%8.0f%9.0f%7s  ", proposals, drafts, accepted, share(accepted, drafts))
	for index, count := range c.byIndex {
		if index < len(before.byIndex) {
			count -= before.byIndex[index]
		}
		line += " " + share(count, rounds)
	}
	return line
}

func share(part, whole float64) string {
	if whole <= 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*min(part/whole, 1))
}

func scrape(ctx context.Context, flags settings) (counts, error) {
	ctx, cancel := context.WithTimeout(ctx, flags.timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, flags.metrics, nil)
	if err != nil {
		return counts{}, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return counts{}, err
	}
	defer func() { _ = answer.Body.Close() }() // it has been read
	if answer.StatusCode != http.StatusOK {
		return counts{}, fmt.Errorf("%s: %s", flags.metrics, answer.Status)
	}
	return readCounts(answer.Body)
}

// readCounts reads the counters from the text format of Prometheus.
func readCounts(text io.Reader) (counts, error) {
	var read counts
	single := map[string]*float64{
		"proposals_total": &read.proposals, "unjudged_proposals_total": &read.unjudged,
		"draft_tokens_total": &read.drafts, "accepted_tokens_total": &read.accepted,
	}
	lines, found := bufio.NewScanner(text), 0
	for lines.Scan() {
		name, number, ok := strings.Cut(strings.TrimPrefix(lines.Text(), metricPrefix), " ")
		value, err := strconv.ParseFloat(number, 64)
		if !ok || err != nil {
			continue
		}
		if place := single[name]; place != nil {
			*place = value
			found++
		}
		if index, ok := strings.CutPrefix(name, `accepted_tokens_per_index_total{draft_index="`); ok {
			read.put(strings.TrimSuffix(index, `"}`), value)
		}
	}
	if err := lines.Err(); err != nil {
		return read, err
	}
	if found < len(single) {
		return read, fmt.Errorf("these are not the metrics of specdraft: %d of %d counters", found, len(single))
	}
	return read, nil
}

func (c *counts) put(index string, value float64) {
	place, err := strconv.Atoi(index)
	if err != nil || place < 0 || place > 1024 {
		return // no draft's
	}
	for len(c.byIndex) <= place {
		c.byIndex = append(c.byIndex, 0)
	}
	c.byIndex[place] = value
}
