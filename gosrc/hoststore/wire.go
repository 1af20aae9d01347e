package hoststore

// This file defines the messages between clients and a store. A message is its length (u32, little-endian) and a
// JSON object. A reply may carry one descriptor.

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/overwire/overwire/gosrc/errs"
)

const (
	protocol   = 2
	maxRequest = 16 << 10
	maxReply   = 32 << 20
	maxSize    = 1 << 50
	maxText    = 300 // bytes of a label, an identity or a sum
	nameLength = 64
)

// The commands.
const (
	opGet    = "get"
	opPut    = "put"
	opSeal   = "seal"
	opList   = "list"
	opDrop   = "drop"
	opBudget = "budget"
)

type request struct {
	Version int    `json:"version"`
	Op      string `json:"op"`
	Name    string `json:"name,omitempty"`
	// Size is the number of bytes to put, or the new budget. A budget of 0 changes nothing.
	Size  int64  `json:"size,omitempty"`
	Label string `json:"label,omitempty"` // put: the text for the entry in lists
	// Identity and Sum belong to seal, and are empty if the name is the digest of all bytes. Identity is the part of a
	// file's name that its bytes do not contain. Sum is compared with all bytes of a plain file.
	Identity string `json:"identity,omitempty"`
	Sum      string `json:"sum,omitempty"`
}

type reply struct {
	// Error and Class are set if the command was refused.
	Error string `json:"error,omitempty"`
	Class string `json:"class,omitempty"`
	// Found says that the name exists. Writing says that another client is putting it.
	Found   bool    `json:"found,omitempty"`
	Writing bool    `json:"writing,omitempty"`
	Size    int64   `json:"size,omitempty"`
	Report  *Report `json:"report,omitempty"`
}

// parseRequest parses and checks a request.
func parseRequest(frame []byte) (q request, err error) {
	d := json.NewDecoder(bytes.NewReader(frame))
	if err := d.Decode(&q); err != nil || d.InputOffset() != int64(len(frame)) {
		return request{}, errs.New(errs.ErrArgument, "a request must be one JSON object")
	}
	if q.Version != protocol {
		return request{}, errs.New(errs.ErrNotSupported, "the store has version %d of the protocol, the client %d: "+
			"use the same version of overwire", protocol, q.Version)
	}
	for _, text := range []string{q.Label, q.Identity, q.Sum} {
		if len(text) > maxText {
			return request{}, errs.New(errs.ErrArgument, "a label, identity or sum has %d bytes, but at most %d are "+
				"allowed", len(text), maxText)
		}
	}
	isNamed := false
	switch q.Op {
	case opGet, opPut, opSeal, opDrop:
		isNamed = true
	case opList, opBudget:
	default:
		return request{}, errs.New(errs.ErrNotSupported, "unknown command %q", errs.OneLine(q.Op[:min(len(q.Op), 30)]))
	}
	if isNamed && (len(q.Name) != nameLength || strings.Trim(q.Name, "0123456789abcdef") != "") {
		return request{}, errs.New(errs.ErrArgument, "a name must be %d hexadecimal digits", nameLength)
	}
	if q.Size < 0 || q.Size > maxSize || q.Op == opPut && q.Size == 0 {
		return request{}, errs.New(errs.ErrArgument, "invalid size %d: expected 0 to %d, and at least 1 for a put",
			q.Size, int64(maxSize))
	}
	return q, nil
}

// parseReply parses a reply.
func parseReply(frame []byte) (r reply, err error) {
	if err := json.Unmarshal(frame, &r); err != nil {
		return reply{}, errs.New(errs.ErrIO, "the store sent an invalid reply")
	}
	return r, nil
}

// refusal returns the reply for an error.
func refusal(err error) reply {
	return reply{Error: strings.TrimPrefix(errs.Message(err), classOf(errs.Class(err)).Error()+": "),
		Class: errs.Class(err)}
}

// classOf returns the error class with a name.
func classOf(name string) error {
	for _, c := range errs.Classes() {
		if c.Python == name {
			return c.Err
		}
	}
	return errs.ErrEngine
}

// sendMessage writes a message, with a descriptor unless fd is -1.
func sendMessage(conn *net.UnixConn, message any, fd int) error {
	body, err := json.Marshal(message)
	if err != nil {
		return errs.New(errs.ErrEngine, "host store: cannot encode a message: %v", err)
	}
	frame := append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	n, _, err := conn.WriteMsgUnix(frame, rights, nil)
	if err == nil && n < len(frame) {
		_, err = conn.Write(frame[n:])
	}
	return err
}

// readFrame reads the body of a message. It waits for the first byte until the reader's deadline, and for the other
// bytes at most rest.
func readFrame(r io.Reader, conn *net.UnixConn, most uint32, rest time.Duration) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:1]); err != nil {
		return nil, err
	}
	if err := conn.SetReadDeadline(time.Now().Add(rest)); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(r, head[1:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > most {
		return nil, errs.New(errs.ErrArgument, "a message has %d bytes, but at most %d are allowed", n, most)
	}
	frame := make([]byte, n)
	_, err := io.ReadFull(r, frame)
	return frame, err
}

// An inlet reads a connection and collects the descriptors that arrive. A store reads without an inlet, so the
// kernel closes descriptors that a client sends.
type inlet struct {
	conn *net.UnixConn
	fds  []int
}

func (r *inlet) Read(p []byte) (int, error) {
	rights := make([]byte, unix.CmsgSpace(4*4)) // room for four: take closes extra descriptors, so they do not leak
	n, k, _, _, err := r.conn.ReadMsgUnix(p, rights)
	if all, parsed := unix.ParseSocketControlMessage(rights[:k]); parsed == nil {
		for i := range all {
			if fds, failed := unix.ParseUnixRights(&all[i]); failed == nil {
				r.fds = append(r.fds, fds...)
			}
		}
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// take returns the descriptor if exactly one has arrived. Otherwise it closes all of them and returns -1.
func (r *inlet) take() int {
	fds := r.fds
	r.fds = nil
	if len(fds) == 1 {
		return fds[0]
	}
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
	return -1
}

// refuseOthers returns an error unless the process at the other end runs as the same user as this one.
func refuseOthers(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return errs.FromOS(err)
	}
	var peer *unix.Ucred
	var failed error
	if err = raw.Control(func(fd uintptr) {
		peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || failed != nil {
		return errs.New(errs.ErrIO, "cannot determine the user at the other end of the socket: %v", os.NewSyscallError(
			"getsockopt", failed))
	}
	if peer.Uid != uint32(syscall.Geteuid()) {
		return errs.New(errs.ErrPermission, "the process at the other end of the socket belongs to user %d, not to "+
			"user %d: each user has a store of their own", peer.Uid, syscall.Geteuid())
	}
	return nil
}
