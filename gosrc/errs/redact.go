package errs

// This file removes credentials from texts.

import (
	"regexp"
	"strings"
	"sync"
)

const hidden = "***"

// A secret is one shape that a credential takes in a text.
type secret struct {
	re   *regexp.Regexp
	with string
}

// secrets returns the patterns, compiled at first use so that importing costs
// nothing. A pattern rather hides too much: losing a path element of an error
// is better than showing a key in a log.
var secrets = sync.OnceValue(func() []secret {
	mk := func(re, with string) secret { return secret{regexp.MustCompile(re), with} }
	return []secret{
		// scheme://user:password@host, where the password may hold anything, and token@host
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s"'@]*:[^\s"']*@`, "${1}"+hidden+"@"),
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s"'@]+@`, "${1}"+hidden+"@"),
		// every query and fragment of a URL: signed ones are secrets, and the names
		// of parameters do not show which are
		mk(`([a-zA-Z][a-zA-Z0-9+.-]*://[^\s"'?#]*)[?#][^\s"']*`, "${1}?"+hidden),
		mk(`(?i)\b(proxy-authorization|authorization|cookie)("?\s*[:=]\s*"?)[^\r\n"]+`, "${1}${2}"+hidden),
		mk(`(?i)\b(bearer)\s+[^\s"',]+`, "${1} "+hidden),
		// key=value and "key": "value"
		mk(`(?i)\b([\w-]*(?:x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|`+
			`secret_?(?:access_?)?key|access_?key(?:_?id)?|session_?token|access_?token|auth_?token|hf_?token|`+
			`api_?key|password|passwd|sas_?token))("?\s*[:=]\s*"?)[^\s"'&,;]+`, "${1}${2}"+hidden),
		// keys known by their form: AWS ids, Hugging Face, GitHub, GitLab, Slack, Google, OpenAI; JSON web tokens
		mk(`\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA)[A-Z0-9]{12,}\b`, hidden),
		mk(`\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|AIza)[A-Za-z0-9_-]{12,}`, hidden),
		mk(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, hidden),
	}
})

// Redact replaces the credentials in a text: user, password and query of URLs,
// bearer tokens and authorization headers, and keys that are named as such or
// have the form of a known service's. Every text that people or logs see passes
// through it.
func Redact(text string) string {
	if !suspicious(text) {
		return text
	}
	for _, s := range secrets() {
		text = s.re.ReplaceAllString(text, s.with)
	}
	return text
}

// suspicious reports whether a text may hold a secret. It is cheap: most texts
// are paths and tensor names and need no regular expression.
func suspicious(text string) bool {
	if strings.ContainsAny(text, "@?=:") {
		return true
	}
	lower := strings.ToLower(text)
	for _, s := range []string{"bearer", "akia", "asia", "agpa", "aida", "aroa", "anpa", "anva",
		"hf_", "gh", "glpat-", "xox", "sk-", "aiza", "eyj"} {
		if strings.Contains(lower, s) {
			return true
		}
	}
	return false
}
