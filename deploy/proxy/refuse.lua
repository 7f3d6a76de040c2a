-- The proxy's own refusals. Over HTTP they are JSON as the server's. Over gRPC they are headers
-- alone: HTTP's status is 200, and gRPC's stands in a header. Where a gateway was asked they are
-- OpenAI's object, which Anthropic's clients read too.
local max_bytes = ngx.var.uri == "/v1/files" and "201m" or ngx.var.max_body -- as in nginx.conf.in
local UNAVAILABLE = { status = 503, grpc = 14, text = "the server is not there; try again" }
local REFUSALS = {
    [401] = { grpc = 16, text = "a known API key is needed: Authorization: Bearer KEY" },
    [404] = { grpc = 12, text = "there is no such path here" },
    [411] = { grpc = 3, text = "a request needs its length" },
    [413] = {
        grpc = 8,
        text = "the request is larger than " .. max_bytes
            .. ", or a stream's requests together than its limit, or one for readiness has a body",
    },
    [415] = { grpc = 12 },
    [429] = { grpc = 8, text = "this key has more requests than its limit" },
    [500] = { grpc = 13, text = "the proxy failed" },
    [502] = UNAVAILABLE,
    [503] = UNAVAILABLE,
    [504] = { grpc = 4, text = "the server did not answer in time" },
}
local OTHER = { grpc = 3, text = "this is no request that is understood" }
local refusal = REFUSALS[ngx.status] or OTHER
local text = ngx.var.reason ~= "" and ngx.var.reason or refusal.text

ngx.req.discard_body()
if (ngx.var.http_content_type or ""):find("^application/grpc") then
    ngx.status = 200
    ngx.header["Content-Type"] = "application/grpc"
    ngx.header["grpc-status"] = refusal.grpc
    ngx.header["grpc-message"] = text
    ngx.header["Content-Length"] = 0 -- without it, the end would come in a frame of its own
    return ngx.send_headers()
end

ngx.status = refusal.status or ngx.status
if ngx.status == 401 then ngx.header["WWW-Authenticate"] = "Bearer" end
if ngx.status == 429 then ngx.header["Retry-After"] = 1 end
if ngx.status == 503 then ngx.header["Retry-After"] = 5 end
if ngx.var.asks_gateway == "" then
    ngx.print('{"error":"' .. text .. '"}')
    return
end
local kind = ngx.status < 429 and "invalid_request_error" or "server_error"
if ngx.status == 429 then kind = "rate_limit_error" end -- as a gateway says
local error = '{"message":"' .. text .. '","type":"' .. kind
    .. '","param":null,"code":"refused_by_proxy"}'
ngx.print('{"type":"error","error":' .. error .. "}")
