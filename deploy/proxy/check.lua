-- What would harm the server although the client has a key: a compressed request, which may have
-- any size once it is unpacked; a length that the server cannot read; JSON nested so deeply that
-- the server's parser runs out of stack, which ends the server.
local MAX_DEPTH = 64
local BACKSLASH, QUOTE = ("\\"):byte(), ('"'):byte()
local OPENING = { [("["):byte()] = true, [("{"):byte()] = true }
local CLOSING = { [("]"):byte()] = true, [("}"):byte()] = true }

local headers = ngx.req.get_headers(0)
local path = ngx.var.uri

local function refuse(status, reason)
    ngx.var.reason = reason
    return ngx.exit(status)
end

-- A header that was sent twice is a table here, and equals no string.
for _, name in ipairs({ "content-encoding", "grpc-encoding" }) do
    if headers[name] and headers[name] ~= "identity" then
        return refuse(415, "a request cannot be compressed here")
    end
end
if path:find("^/inference%.") or path == "/v1/files" then return end

-- How many bytes of the body are JSON: all, unless tensors in binary form come after it.
local json_bytes = 0x7fffffff
local length = headers["inference-header-content-length"]
if length then
    if type(length) ~= "string" or not length:find("^%d+$") or #length > 9 then
        return refuse(400, "Inference-Header-Content-Length must be a number of bytes")
    end
    if path:find("/infer$") then json_bytes = tonumber(length) end
end

local depth, is_quoted, is_escaped = 0, false, false

-- Whether one more piece of the JSON is nested no deeper than MAX_DEPTH.
local function stays_flat(piece)
    for i = 1, #piece do
        local byte = piece:byte(i)
        if is_escaped then
            is_escaped = false
        elseif is_quoted then
            is_escaped = byte == BACKSLASH
            is_quoted = byte ~= QUOTE
        elseif byte == QUOTE then
            is_quoted = true
        elseif OPENING[byte] then
            depth = depth + 1
            if depth > MAX_DEPTH then return false end
        elseif CLOSING[byte] then
            depth = depth - 1
        end
    end
    return true
end

-- A body beyond nginx's buffer stands in /tmp until its request ends. So that one key does not fill
-- it for all, each has a share. While a body comes it counts as long as was announced. One of
-- unknown length counts FIRST, or what has come of it; then as long as it is. A request that is
-- alone passes, however large bodies may be. nginx.conf.in gives the bytes back.
local BUFFER = 16 * 1024
local SHARE = 80 * 1024 * 1024 -- a quarter of /tmp
local FIRST = 256 * 1024 -- 320 times in SHARE: for more requests than a key may have open by default
local LOOK_S = 0.1 -- between two looks at how much has come
local UNITS = { k = 1024, m = 1024 * 1024, g = 1024 * 1024 * 1024 }
local digits, unit = ngx.var.max_body:match("^(%d+)(%a?)$")
local announced = tonumber(headers["content-length"])
if not announced and ngx.req.http_version() < 2 and not headers["transfer-encoding"] then
    announced = 0
end
local first = announced or math.min(FIRST, tonumber(digits) * (UNITS[unit] or 1))

-- Let this request hold so many bytes; returns how many its key holds then.
local function hold(bytes)
    local more = bytes - tonumber(ngx.var.held)
    ngx.var.held = bytes
    return ngx.shared.bodies:incr(ngx.var.key_name, more, 0)
end

-- Whether the key holds more than its share, once this request holds so many bytes.
local function exceeds(bytes)
    local held = hold(bytes)
    return held > SHARE and held > bytes
end

local function refuse_share()
    return refuse(429, "the bodies of the requests of this key take all of its share")
end
if first > BUFFER and exceeds(first) then return refuse_share() end

-- nginx bounds the time between two pieces of a body, not that of all.
local is_complete, is_too_much = false, false
local reader = ngx.thread.spawn(function()
    ngx.req.read_body()
    is_complete = true
end)
if not is_complete then
    local left_s = tonumber(ngx.var.body_seconds)
    local clock = ngx.thread.spawn(function()
        while not announced and left_s > LOOK_S do
            ngx.sleep(LOOK_S)
            left_s = left_s - LOOK_S
            -- With the headers.
            local come = tonumber(ngx.var.request_length)
            if come > first and exceeds(come) then
                is_too_much = true
                return
            end
        end
        ngx.sleep(left_s)
    end)
    ngx.thread.wait(reader, clock)
    if is_too_much then return refuse_share() end
    if not is_complete then
        return ngx.exit(408) -- at which nginx cuts the client off, as at its own time-out
    end
    ngx.thread.kill(clock)
end
local is_flat = true
local name = ngx.req.get_body_file()
if not name and first > BUFFER then hold(0) end
if name then
    local file = assert(io.open(name, "rb"))
    local is_over = exceeds(file:seek("end"))
    if is_over and not announced then
        file:close()
        return refuse_share()
    end
    file:seek("set")
    while is_flat and json_bytes > 0 do
        local piece = file:read(math.min(json_bytes, 65536))
        if not piece then break end
        is_flat, json_bytes = stays_flat(piece), json_bytes - #piece
        ngx.sleep(0) -- a large body takes a while: others come in between
    end
    file:close()
else
    is_flat = stays_flat((ngx.req.get_body_data() or ""):sub(1, json_bytes))
end
if not is_flat then
    return refuse(400, "the JSON is nested more than " .. MAX_DEPTH .. " deep")
end

-- What the key may ask for. Over HTTP the server hands no header on to the model, so it becomes a
-- parameter of the request; the model refuses one that has it twice.
local limits = ngx.var.key_limits
if limits ~= "" and (path:find("/generate$") or path:find("/generate_stream$")) then
    local body = ngx.req.get_body_data() or ""
    if name then
        local file = assert(io.open(name, "rb"))
        body = file:read("*a")
        file:close()
    end
    local _, brace = body:find("^%s*{")
    if not brace then return refuse(400, "the request must be a JSON object") end
    local comma = body:find("^%s*}", brace + 1) and "" or ","
    ngx.req.set_body_data('{"jitney-limits":"' .. limits .. '"' .. comma .. body:sub(brace + 1))
end
