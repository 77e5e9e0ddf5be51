package specdraft

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Client is a connection to the service. Its methods are safe for concurrent use.
type Client struct {
	conn    *grpc.ClientConn
	stub    pb.DrafterClient
	target  string
	timeout time.Duration

	mu       sync.Mutex
	closed   bool
	sessions map[*Session]struct{}
}

// Dial connects to "unix:///path/to/socket" or "host:port" and asks the service what it is, so that a wrong address is
// known at once.
func Dial(ctx context.Context, target string, options ...Option) (*Client, error) {
	if strings.HasPrefix(target, "/") { // gRPC would look for a host of this name
		return nil, argumentError("target %q is a path: write unix://%s", target, target)
	}
	settings := readOptions(options)
	if settings.timeout <= 0 {
		return nil, argumentError("a timeout of %v", settings.timeout)
	}
	conn, err := grpc.NewClient(target, settings.grpcOptions()...)
	if err != nil {
		return nil, argumentError("%v", err)
	}
	client := &Client{
		conn:     conn,
		stub:     pb.NewDrafterClient(conn),
		target:   target,
		timeout:  settings.timeout,
		sessions: map[*Session]struct{}{},
	}
	if _, err := client.ServerInfo(ctx); err != nil {
		_ = conn.Close() // the first error is the one to tell
		return nil, err
	}
	return client, nil
}

// Close ends the sessions that are open and the connection. It may be called twice.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	sessions := c.sessions
	c.sessions = nil
	c.mu.Unlock()
	var all []error
	for session := range sessions {
		all = append(all, session.Close(context.Background()))
	}
	return errors.Join(append(all, c.conn.Close())...)
}

// Target is the address that was dialled.
func (c *Client) Target() string { return c.target }

// ServerInfo asks what the service is. Nothing of it changes while the service's process lives, except its runner.
func (c *Client) ServerInfo(ctx context.Context) (*pb.GetServerInfoResponse, error) {
	info, err := invoke(ctx, c.transport(nil), rpcGetServerInfo(), &pb.GetServerInfoRequest{})
	if err != nil {
		return nil, err
	}
	return info, nil
}

// OpenSession opens a session. It answers HANDSHAKE_MISMATCH where client and head do not fit.
func (c *Client) OpenSession(ctx context.Context, options SessionOptions) (*Session, error) {
	options, err := options.filled()
	if err != nil {
		return nil, err
	}
	granted, failed := c.openGrant(ctx, options)
	if failed != nil {
		return nil, failed
	}
	session := &Session{
		client:  c,
		options: options,
		grant:   granted,
		book:    newCarryBook(options.CarriesMax, options.CarryTokensMax),
		opening: make(chan struct{}, 1),
	}
	c.mu.Lock()
	if !c.closed {
		c.sessions[session] = struct{}{}
		c.mu.Unlock()
		return session, nil
	}
	c.mu.Unlock()
	_ = session.Close(ctx) // the client was closed meanwhile
	return nil, closedError()
}

func (c *Client) forget(session *Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sessions, session)
}

// transport performs the calls of the session with this token; nil = before there is one.
func (c *Client) transport(token []byte) *transport {
	made := &transport{stub: c.stub, token: token, timeout: c.timeout}
	c.mu.Lock()
	defer c.mu.Unlock()
	made.closed.Store(c.closed)
	return made
}
