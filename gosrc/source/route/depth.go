package route

// This file classifies addresses: on the internet, in a private network, or link-local.

import (
	"net/netip"
	"strings"
	"sync/atomic"
)

// The classes of addresses, from the outside in.
const (
	internet = 0
	network  = 1 // this machine or its private networks
	link     = 2 // link-local, which includes the metadata services of clouds
)

// pretence replaces depthOf in tests; see Pretend.
var pretence atomic.Pointer[func(netip.Addr) (int, bool)]

// Pretend replaces the classification of addresses in tests, which only have loopback addresses. fn returns a class (0
// for the internet, 1 for a private network, 2 for link-local); ok is false if the real class applies. end removes fn.
func Pretend(fn func(netip.Addr) (near int, ok bool)) (end func()) {
	pretence.Store(&fn)
	return func() { pretence.Store(nil) }
}

func parsePrefixes(texts ...string) (out []netip.Prefix) {
	for _, t := range texts {
		out = append(out, netip.MustParsePrefix(t))
	}
	return out
}

var (
	networks = parsePrefixes(
		"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16",
		"240.0.0.0/4", "::/127", "64:ff9b:1::/48", "fc00::/7", "fec0::/10")
	links = parsePrefixes("169.254.0.0/16", "224.0.0.0/4", "fe80::/10", "ff00::/8",
		// Metadata services at other addresses: Alibaba, Oracle, Azure, AWS, Google.
		"100.100.100.200/32", "192.0.0.192/32", "168.63.129.16/32", "fd00:ec2::/32", "fd20:ce::/32")
	mapped  = netip.MustParsePrefix("::ffff:0:0:0/96") // RFC 2765
	compat  = netip.MustParsePrefix("::/96")           // RFC 4291, 2.5.5.1
	nat64   = netip.MustParsePrefix("64:ff9b::/96")    // RFC 6052
	local64 = netip.MustParsePrefix("64:ff9b:1::/48")  // RFC 8215
	sixToV4 = netip.MustParsePrefix("2002::/16")
	teredo  = netip.MustParsePrefix("2001::/32")
)

// depthOf classifies an address. least and most differ if a translator between IPv6 and IPv4 may route it to
// another class.
func depthOf(a netip.Addr) (least, most int) {
	a = a.Unmap().WithZone("")
	if fn := pretence.Load(); fn != nil {
		if near, ok := (*fn)(a); ok {
			return near, near
		}
	}
	near := func(a netip.Addr) int {
		for _, p := range links {
			if p.Contains(a) {
				return link
			}
		}
		for _, p := range networks {
			if p.Contains(a) {
				return network
			}
		}
		return internet
	}
	most = near(a)
	inside := embeddedAddresses(a)
	if len(inside) == 0 {
		return most, most
	}
	for _, v4 := range inside {
		most = max(most, near(v4))
	}
	return internet, most
}

// embeddedAddresses returns the IPv4 addresses that an IPv6 address may be translated to.
func embeddedAddresses(a netip.Addr) (out []netip.Addr) {
	if !a.Is6() || a == netip.IPv6Unspecified() || a == netip.IPv6Loopback() {
		return nil
	}
	b := a.As16()
	v4 := func(at ...int) { out = append(out, netip.AddrFrom4([4]byte{b[at[0]], b[at[1]], b[at[2]], b[at[3]]})) }
	switch {
	case compat.Contains(a), mapped.Contains(a), nat64.Contains(a):
		v4(12, 13, 14, 15)
	case local64.Contains(a): // the prefix has one of these lengths; byte 8 is always zero
		v4(6, 7, 9, 10)
		v4(7, 9, 10, 11)
		v4(9, 10, 11, 12)
		v4(12, 13, 14, 15)
	case sixToV4.Contains(a):
		v4(2, 3, 4, 5)
	case teredo.Contains(a): // the server, and the client with inverted bits
		v4(4, 5, 6, 7)
		for i := 12; i < 16; i++ {
			b[i] ^= 0xff
		}
		v4(12, 13, 14, 15)
	case b[8]&0xfd == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP
		v4(12, 13, 14, 15)
	}
	return out
}

// literalAddress returns the address that a host name spells. For any other name it returns the zero address,
// which counts as the internet.
func literalAddress(host string) netip.Addr {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return netip.IPv6Loopback()
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return netip.Addr{}
	}
	return a
}

// Inside reports whether a URL's host is an address of a private network or of this machine. It does not resolve names.
func Inside(host string) bool {
	least, _ := depthOf(literalAddress(host))
	return least > internet
}
