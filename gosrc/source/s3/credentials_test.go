package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/overwire/overwire/gosrc/errs"
	"github.com/overwire/overwire/gosrc/source"
)

// identities replaces the services that provide credentials: STS, the container's endpoint, and the instance's
// metadata (version 2). They are not available outside AWS. Each expects the same requests as the real service.
func identities(t *testing.T) *httptest.Server {
	until := time.Now().Add(time.Hour).UTC().Format(time.RFC3339)
	sts := func(action string, key string) string {
		return fmt.Sprintf(`<%sResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><%sResult><Credentials><AccessKeyId>%s</AccessKeyId>`+
			`<SecretAccessKey>s</SecretAccessKey><SessionToken>planted-token</SessionToken><Expiration>%s</Expiration></Credentials></%sResult></%sResponse>`,
			action, action, key, until, action, action)
	}
	json := func(key string) string {
		return fmt.Sprintf(`{"Code":"Success","Type":"AWS-HMAC","AccessKeyId":%q,"SecretAccessKey":"s","Token":"planted-token","Expiration":%q}`, key, until)
	}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = r.ParseForm()
		switch {
		case r.Form.Get("Action") == "AssumeRoleWithWebIdentity" && r.Form.Get("WebIdentityToken") == "planted-identity" && r.Form.Get("RoleArn") == "arn:aws:iam::1:role/web":
			fmt.Fprint(w, sts("AssumeRoleWithWebIdentity", "WEB"))
		case r.Form.Get("Action") == "AssumeRole" && strings.Contains(r.Header.Get("Authorization"), "Credential=BASE/") && r.Form.Get("ExternalId") == "ext":
			fmt.Fprint(w, sts("AssumeRole", "ROLE"))
		case r.URL.Path == "/container" && r.Header.Get("Authorization") == "planted-container":
			fmt.Fprint(w, json("CONTAINER"))
		case r.URL.Path == "/latest/api/token" && r.Method == http.MethodPut:
			w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "60")
			fmt.Fprint(w, "planted-imds")
		case r.Header.Get("X-Aws-Ec2-Metadata-Token") == "planted-imds" && r.URL.Path == "/latest/meta-data/iam/security-credentials/":
			fmt.Fprint(w, "role")
		case r.Header.Get("X-Aws-Ec2-Metadata-Token") == "planted-imds" && r.URL.Path == "/latest/meta-data/iam/security-credentials/role":
			fmt.Fprint(w, json("INSTANCE"))
		default:
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `<ErrorResponse><Error><Code>AccessDenied</Code><Message>planted</Message></Error><RequestId>id-1</RequestId></ErrorResponse>`)
		}
	}))
	t.Cleanup(h.Close)
	return h
}

// Every provider of the chain works, in its order of precedence. Credentials come only from the options, never
// from the environment of the process.
func TestChain(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "FROMTHEPROCESS")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "s")
	ids := identities(t)
	home := t.TempDir()
	write := func(name, text string) string {
		p := filepath.Join(home, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	write(".aws/credentials", "[default]\naws_access_key_id=FILE\naws_secret_access_key=s\n[base]\naws_access_key_id=BASE\naws_secret_access_key=s\n"+
		"[windows]\r\naws_access_key_id=WINDOWS\r\naws_secret_access_key=s\r\n")
	write(".aws/config", `[profile base]
region = eu-north-1
[profile role]
role_arn = arn:aws:iam::1:role/r
source_profile = base
external_id = ext
[profile process]
credential_process = echo '{"Version":1,"AccessKeyId":"'$AWS_PLANTED'","SecretAccessKey":"s"}'
[profile web]
role_arn = arn:aws:iam::1:role/web
web_identity_token_file = `+write("token", "planted-identity")+`
[profile env]
role_arn = arn:aws:iam::1:role/r
external_id = ext
credential_source = Environment
[profile mfa]
role_arn = arn:aws:iam::1:role/r
source_profile = base
mfa_serial = arn:aws:iam::1:mfa/x
[profile login]
login_session = arn:aws:sts::1:x
[profile broken]
sso_account_id = 1
sso_role_name = r
`)
	file := write("bearer", "planted-container\n")
	everywhere := map[string]string{"AWS_ENDPOINT_URL_STS": ids.URL, "AWS_EC2_METADATA_SERVICE_ENDPOINT": ids.URL}
	type env = map[string]string
	for _, c := range []struct {
		what    string
		storage env
		env     env
		key     string // expected access key
		class   error
	}{
		{"keys of the caller", env{"key": "GIVEN", "secret": "s", "token": "t"}, env{"HOME": home, "AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "s"}, "GIVEN", nil},
		{"boto3's names", env{"aws_access_key_id": "GIVEN", "aws_secret_access_key": "s", "aws_session_token": "t", "region_name": "eu-north-1"}, env{}, "GIVEN", nil},
		{"obstore's names", env{"access_key_id": "GIVEN", "secret_access_key": "s", "session_token": "t", "endpoint": "https://store.example"}, env{}, "GIVEN", nil},
		{"one value by two names", env{"access_key_id": "GIVEN", "key": "GIVEN", "secret": "s"}, env{}, "GIVEN", nil},
		{"two values for one option", env{"access_key_id": "GIVEN", "key": "OTHER", "secret": "planted"}, env{}, "", errs.ErrArgument},
		{"a key that ends in a line break", env{"key": "GIVEN\n", "secret": "s\r\n", "token": "t\n"}, env{}, "GIVEN", nil},
		{"an environment whose keys end in line breaks", nil, env{"AWS_ACCESS_KEY_ID": "ENV\r\n", "AWS_SECRET_ACCESS_KEY": "s\n", "AWS_SESSION_TOKEN": "t\n"}, "ENV", nil},
		{"a profile with line ends of Windows", env{"profile": "windows"}, env{"HOME": home}, "WINDOWS", nil},
		{"a process whose keys end in line breaks", env{"profile": "process"}, env{"HOME": home, "AWS_PLANTED": `PROCESS\\n`}, "PROCESS", nil},
		{"a line break in the key", env{"key": "GI\nVEN", "secret": "s"}, env{}, "", errs.ErrArgument},
		{"a line break in the secret", env{"key": "GIVEN", "secret": "planted\r\nx"}, env{}, "", errs.ErrArgument},
		{"a line break in the token", env{"key": "GIVEN", "secret": "s", "token": "planted\x00x"}, env{}, "", errs.ErrArgument},
		{"a line break in the environment's token", nil, env{"AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "planted\nx"}, "", errs.ErrPermission},
		{"a line break in a process's key", env{"profile": "process"}, env{"HOME": home, "AWS_PLANTED": `planted\\nx`}, "", errs.ErrPermission},
		{"the caller's profile before the environment", env{"profile": "base"}, env{"HOME": home, "AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "s"}, "BASE", nil},
		{"the environment before AWS_PROFILE", nil, env{"HOME": home, "AWS_PROFILE": "base", "AWS_ACCESS_KEY_ID": "ENV", "AWS_SECRET_ACCESS_KEY": "s"}, "ENV", nil},
		{"AWS_PROFILE", nil, env{"HOME": home, "AWS_PROFILE": "base"}, "BASE", nil},
		{"the default profile", nil, env{"HOME": home}, "FILE", nil},
		{"USERPROFILE", nil, env{"USERPROFILE": home}, "FILE", nil},
		{"another file", nil, env{"HOME": "/none", "AWS_SHARED_CREDENTIALS_FILE": filepath.Join(home, ".aws/credentials")}, "FILE", nil},
		{"web identity", nil, env{"HOME": home, "AWS_WEB_IDENTITY_TOKEN_FILE": filepath.Join(home, "token"), "AWS_ROLE_ARN": "arn:aws:iam::1:role/web"}, "WEB", nil},
		{"a web identity that is refused", nil, env{"AWS_WEB_IDENTITY_TOKEN_FILE": file, "AWS_ROLE_ARN": "arn:aws:iam::1:role/web"}, "", errs.ErrPermission},
		{"a web identity without a role", nil, env{"AWS_WEB_IDENTITY_TOKEN_FILE": file}, "", errs.ErrArgument},
		{"a profile's web identity", env{"profile": "web"}, env{"HOME": home}, "WEB", nil},
		{"a role on another profile", env{"profile": "role"}, env{"HOME": home}, "ROLE", nil},
		{"a role on the environment's keys", env{"profile": "env"}, env{"HOME": home, "AWS_ACCESS_KEY_ID": "BASE", "AWS_SECRET_ACCESS_KEY": "s"}, "ROLE", nil},
		{"a role with keys that may not assume it", env{"profile": "env"}, env{"HOME": home, "AWS_ACCESS_KEY_ID": "OTHER", "AWS_SECRET_ACCESS_KEY": "s"}, "", errs.ErrPermission},
		{"a second factor", env{"profile": "mfa"}, env{"HOME": home}, "", errs.ErrNotSupported},
		{"aws login", env{"profile": "login"}, env{"HOME": home}, "", errs.ErrNotSupported},
		{"an incomplete single sign-on", env{"profile": "broken"}, env{"HOME": home}, "", errs.ErrArgument},
		{"a process, in this environment", env{"profile": "process"}, env{"HOME": home, "AWS_PLANTED": "PROCESS"}, "PROCESS", nil},
		{"the container", nil, env{"AWS_CONTAINER_CREDENTIALS_FULL_URI": ids.URL + "/container", "AWS_CONTAINER_AUTHORIZATION_TOKEN": "planted-container"}, "CONTAINER", nil},
		{"the container, token in a file", nil, env{"AWS_CONTAINER_CREDENTIALS_FULL_URI": ids.URL + "/container", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": file}, "CONTAINER", nil},
		{"a container elsewhere", nil, env{"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://198.51.100.7/x"}, "", errs.ErrPermission},
		{"the instance", nil, env{}, "INSTANCE", nil},
		{"no instance", nil, env{"AWS_EC2_METADATA_DISABLED": "true"}, "", errs.ErrPermission},
		{"unsigned", env{"anon": "true"}, env{"HOME": home}, "", nil},
	} {
		for k, v := range everywhere {
			c.env[k] = v
		}
		key, err := func() (string, error) {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			cl, err := acquireClient(ctx, source.Options{Storage: c.storage, Env: c.env})
			if err != nil {
				return "", err
			}
			defer cl.releaseClient()
			if cl.creds == nil {
				return "", nil
			}
			got, err := cl.creds.Retrieve(ctx)
			return got.AccessKeyID, classifyError(ctx, err)
		}()
		if key != c.key || !errors.Is(err, c.class) || c.class == nil && err != nil {
			t.Errorf("%s: %q %v", c.what, key, err)
		}
		if strings.HasPrefix(c.what, "a line break in") && !strings.Contains(err.Error(), "line break") {
			t.Errorf("%s: %v", c.what, err)
		}
		if err != nil && strings.Contains(err.Error(), "planted") {
			t.Errorf("%s: %v shows a secret", c.what, err)
		}
	}
}

// The endpoint, region and addressing style follow the order of precedence. A store may refer the client to
// another region.
func TestEndpointAndRegion(t *testing.T) {
	home := t.TempDir()
	config := filepath.Join(home, "config")
	if err := os.WriteFile(config, []byte("[default]\nendpoint_url=https://profile.example\nregion=eu-west-9\n[profile svc]\nservices=x\n[services x]\ns3 =\n  endpoint_url = https://service.example\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	type env = map[string]string
	for _, c := range []struct {
		storage, env     env
		endpoint, region string
		path             bool
	}{
		{nil, env{}, "", "us-east-1", false},
		{nil, env{"AWS_DEFAULT_REGION": "eu-central-1"}, "", "eu-central-1", false},
		{env{"region": "xx-1"}, env{"AWS_REGION": "eu-central-1"}, "", "xx-1", false},
		{nil, env{"AWS_CONFIG_FILE": config}, "https://profile.example", "eu-west-9", true},
		{nil, env{"AWS_CONFIG_FILE": config, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, "", "eu-west-9", false},
		{env{"profile": "svc"}, env{"AWS_CONFIG_FILE": config}, "https://service.example", "us-east-1", true},
		{nil, env{"AWS_CONFIG_FILE": config, "AWS_ENDPOINT_URL": "http://all:1"}, "http://all:1", "eu-west-9", true},
		{nil, env{"AWS_ENDPOINT_URL": "http://all:1", "AWS_ENDPOINT_URL_S3": "http://s3:1"}, "http://s3:1", "us-east-1", true},
		{env{"endpoint_url": "given.example"}, env{"AWS_ENDPOINT_URL_S3": "http://s3:1"}, "https://given.example", "us-east-1", true},
		{env{"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, env{}, "https://s3.eu-west-1.amazonaws.com", "us-east-1", false},
		{env{"endpoint_url": "https://cwobject.com"}, env{}, "https://cwobject.com", "us-east-1", false},
		{env{"endpoint_url": "https://cwobject.com", "path_style": "true"}, env{}, "https://cwobject.com", "us-east-1", true},
		{env{"endpoint_url": "http://127.0.0.1:9", "path_style": "false"}, env{}, "http://127.0.0.1:9", "us-east-1", false},
	} {
		s, err := resolveSettings(bg, source.Options{Storage: c.storage, Env: c.env})
		if err != nil || s.endpoint != c.endpoint || s.region != c.region || s.pathStyle != c.path {
			t.Errorf("%v %v: %+v %v", c.storage, c.env, s, err)
		}
	}
	var asked atomic.Int64
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if !strings.Contains(r.Header.Get("Authorization"), "/eu-moved-1/s3/") {
			w.Header().Set("X-Amz-Bucket-Region", "eu-moved-1")
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-moved-1</Region></Error>")
			return
		}
		w.Header().Set("ETag", `"x"`)
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader("hello"))
	}))
	t.Cleanup(h.Close)
	opt := source.Options{Storage: env{"endpoint_url": h.URL, "key": "k", "secret": "s"}}
	for range 2 {
		if b, err := get("s3://b/k", opt); err != nil || string(b) != "hello" {
			t.Fatalf("%q %v", b, err)
		}
	}
	if asked.Load() != 3 {
		t.Errorf("%d requests, want 3: the region is learned once, and opening reads the object", asked.Load())
	}
}

// The proxy from the environment is used for its hosts.
func TestProxy(t *testing.T) {
	var through atomic.Int64
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Host != "store.example" {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		through.Add(1)
		w.Header().Set("ETag", `"x"`)
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader("hello"))
	}))
	t.Cleanup(h.Close)
	opt := source.Options{Storage: map[string]string{"endpoint_url": "http://store.example", "anon": "true", "retries": "0"}}
	for _, name := range []string{"http_proxy", "HTTP_PROXY", "ALL_PROXY"} {
		opt.Env = map[string]string{name: h.URL}
		if b, err := get("s3://b/k", opt); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q %v", name, b, err)
		}
	}
	if through.Load() != 3 {
		t.Error(through.Load())
	}
}
