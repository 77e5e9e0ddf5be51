package specdraft

import (
	"context"

	"google.golang.org/grpc"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// rpc describes one call: by itself, and on a Drive stream.
type rpc[Req, Resp any] struct {
	name string
	call func(pb.DrafterClient, context.Context, *Req, ...grpc.CallOption) (*Resp, error)
	// put and get are nil where the call does not travel on the stream. KeepAlive stays unary and independent of it.
	put func(*pb.DriveRequest, *Req)
	get func(*pb.DriveResponse) *Resp
}

func rpcGetServerInfo() rpc[pb.GetServerInfoRequest, pb.GetServerInfoResponse] {
	return rpc[pb.GetServerInfoRequest, pb.GetServerInfoResponse]{name: "GetServerInfo", call: pb.DrafterClient.GetServerInfo}
}

func rpcOpenSession() rpc[pb.OpenSessionRequest, pb.OpenSessionResponse] {
	return rpc[pb.OpenSessionRequest, pb.OpenSessionResponse]{name: "OpenSession", call: pb.DrafterClient.OpenSession}
}

func rpcKeepAlive() rpc[pb.KeepAliveRequest, pb.KeepAliveResponse] {
	return rpc[pb.KeepAliveRequest, pb.KeepAliveResponse]{name: "KeepAlive", call: pb.DrafterClient.KeepAlive}
}

func rpcCloseSession() rpc[pb.CloseSessionRequest, pb.CloseSessionResponse] {
	return rpc[pb.CloseSessionRequest, pb.CloseSessionResponse]{name: "CloseSession", call: pb.DrafterClient.CloseSession}
}

func rpcPropose() rpc[pb.ProposeRequest, pb.ProposeResponse] {
	return rpc[pb.ProposeRequest, pb.ProposeResponse]{
		"Propose", pb.DrafterClient.Propose,
		func(frame *pb.DriveRequest, request *pb.ProposeRequest) {
			frame.Request = &pb.DriveRequest_Propose{Propose: request}
		},
		(*pb.DriveResponse).GetPropose,
	}
}

func rpcCatchup() rpc[pb.CatchupRequest, pb.CatchupResponse] {
	return rpc[pb.CatchupRequest, pb.CatchupResponse]{
		"Catchup", pb.DrafterClient.Catchup,
		func(frame *pb.DriveRequest, request *pb.CatchupRequest) {
			frame.Request = &pb.DriveRequest_Catchup{Catchup: request}
		},
		(*pb.DriveResponse).GetCatchup,
	}
}

func rpcTruncate() rpc[pb.TruncateRequest, pb.TruncateResponse] {
	return rpc[pb.TruncateRequest, pb.TruncateResponse]{
		"Truncate", pb.DrafterClient.Truncate,
		func(frame *pb.DriveRequest, request *pb.TruncateRequest) {
			frame.Request = &pb.DriveRequest_Truncate{Truncate: request}
		},
		(*pb.DriveResponse).GetTruncate,
	}
}

func rpcOpenSequence() rpc[pb.OpenSequenceRequest, pb.OpenSequenceResponse] {
	return rpc[pb.OpenSequenceRequest, pb.OpenSequenceResponse]{
		"OpenSequence", pb.DrafterClient.OpenSequence,
		func(frame *pb.DriveRequest, request *pb.OpenSequenceRequest) {
			frame.Request = &pb.DriveRequest_OpenSequence{OpenSequence: request}
		},
		(*pb.DriveResponse).GetOpenSequence,
	}
}

func rpcCloseSequence() rpc[pb.CloseSequenceRequest, pb.CloseSequenceResponse] {
	return rpc[pb.CloseSequenceRequest, pb.CloseSequenceResponse]{
		"CloseSequence", pb.DrafterClient.CloseSequence,
		func(frame *pb.DriveRequest, request *pb.CloseSequenceRequest) {
			frame.Request = &pb.DriveRequest_CloseSequence{CloseSequence: request}
		},
		(*pb.DriveResponse).GetCloseSequence,
	}
}

func rpcGetSequence() rpc[pb.GetSequenceRequest, pb.GetSequenceResponse] {
	return rpc[pb.GetSequenceRequest, pb.GetSequenceResponse]{
		"GetSequence", pb.DrafterClient.GetSequence,
		func(frame *pb.DriveRequest, request *pb.GetSequenceRequest) {
			frame.Request = &pb.DriveRequest_GetSequence{GetSequence: request}
		},
		(*pb.DriveResponse).GetGetSequence,
	}
}

func rpcForkSequence() rpc[pb.ForkSequenceRequest, pb.ForkSequenceResponse] {
	return rpc[pb.ForkSequenceRequest, pb.ForkSequenceResponse]{
		"ForkSequence", pb.DrafterClient.ForkSequence,
		func(frame *pb.DriveRequest, request *pb.ForkSequenceRequest) {
			frame.Request = &pb.DriveRequest_ForkSequence{ForkSequence: request}
		},
		(*pb.DriveResponse).GetForkSequence,
	}
}

func rpcReadDrafts() rpc[pb.ReadDraftsRequest, pb.ReadDraftsResponse] {
	return rpc[pb.ReadDraftsRequest, pb.ReadDraftsResponse]{
		"ReadDrafts", pb.DrafterClient.ReadDrafts,
		func(frame *pb.DriveRequest, request *pb.ReadDraftsRequest) {
			frame.Request = &pb.DriveRequest_ReadDrafts{ReadDrafts: request}
		},
		(*pb.DriveResponse).GetReadDrafts,
	}
}

func rpcTakeKV() rpc[pb.TakeKVRequest, pb.TakeKVResponse] {
	return rpc[pb.TakeKVRequest, pb.TakeKVResponse]{
		"TakeKV", pb.DrafterClient.TakeKV,
		func(frame *pb.DriveRequest, request *pb.TakeKVRequest) {
			frame.Request = &pb.DriveRequest_TakeKv{TakeKv: request}
		},
		(*pb.DriveResponse).GetTakeKv,
	}
}

func rpcInstallKV() rpc[pb.InstallKVRequest, pb.InstallKVResponse] {
	return rpc[pb.InstallKVRequest, pb.InstallKVResponse]{
		"InstallKV", pb.DrafterClient.InstallKV,
		func(frame *pb.DriveRequest, request *pb.InstallKVRequest) {
			frame.Request = &pb.DriveRequest_InstallKv{InstallKv: request}
		},
		(*pb.DriveResponse).GetInstallKv,
	}
}

func rpcFreeKV() rpc[pb.FreeKVRequest, pb.FreeKVResponse] {
	return rpc[pb.FreeKVRequest, pb.FreeKVResponse]{
		"FreeKV", pb.DrafterClient.FreeKV,
		func(frame *pb.DriveRequest, request *pb.FreeKVRequest) {
			frame.Request = &pb.DriveRequest_FreeKv{FreeKv: request}
		},
		(*pb.DriveResponse).GetFreeKv,
	}
}
