-- Looks at a request of a client that has a key, before a server or a gateway gets it.
--
-- It refuses what would harm the server:
--   - a compressed body, which may have any size once it is unpacked;
--   - a header that says how long the JSON is, with something else than a number;
--   - JSON nested so deeply that the server's parser runs out of stack, which ends the server.
-- It bounds what one key takes from the others: bytes of bodies in /tmp, and time for a body.
-- It puts the limits of the key into a request to a language model.

local MAX_DEPTH = 64
local BACKSLASH = ("\\"):byte()
local QUOTE = ('"'):byte()
local OPENING = { [("["):byte()] = true, [("{"):byte()] = true }
local CLOSING = { [("]"):byte()] = true, [("}"):byte()] = true }

-- A body that is larger than nginx's buffer lies in /tmp until its request ends. Each key has a
-- share of /tmp, so that one key does not fill it for all.
local BUFFER_BYTES = 16 * 1024
local SHARE_BYTES = 80 * 1024 * 1024 -- a quarter of /tmp
-- What a body of unknown length counts at first. SHARE_BYTES is 320 times as much, which is more
-- than the requests that a key may have open by default.
local UNKNOWN_BYTES = 256 * 1024
local LOOK_S = 0.1 -- seconds between two looks at how much of a body has come
local PIECE_BYTES = 65536 -- read from a file at a time
local UNITS = { [""] = 1, k = 1024, m = 1024 * 1024, g = 1024 * 1024 * 1024 }

local headers = ngx.req.get_headers(0)
local path = ngx.var.uri

-- Ends the request: ngx.exit does not return.
local function refuse(status, reason)
    ngx.var.reason = reason
    return ngx.exit(status)
end

---------------------------------------------------------------------------------- headers

local function refuse_compression()
    for _, name in ipairs({ "content-encoding", "grpc-encoding" }) do
        -- The value of a header that was sent twice is a table, which equals no string.
        if headers[name] and headers[name] ~= "identity" then
            refuse(415, "a request cannot be compressed here")
        end
    end
end

-- How many bytes at the body's beginning are JSON. Tensors in binary form may come after them. nil:
-- all of them are.
local function read_json_bytes()
    local length = headers["inference-header-content-length"]
    if not length then return nil end
    if type(length) ~= "string" or not length:find("^%d+$") or #length > 9 then
        refuse(400, "Inference-Header-Content-Length must be a number of bytes")
    end
    -- No other request can have tensors in binary form.
    if not path:find("/infer$") then return nil end
    return tonumber(length)
end

-- The length of the body that the client has announced. nil: it has announced none.
local function read_announced_bytes()
    local announced = tonumber(headers["content-length"])
    if announced then return announced end
    local may_have_body = ngx.req.http_version() >= 2 or headers["transfer-encoding"]
    if may_have_body then return nil end
    return 0
end

-- The largest body that is allowed, such as 8m.
local function read_max_bytes()
    local digits, unit = ngx.var.max_body:match("^(%d+)(%a?)$")
    return tonumber(digits) * UNITS[unit]
end

---------------------------------------------------------------------------------- the key's share

-- Let this request hold so many bytes. Returns how many the key holds then. nginx.conf.in gives
-- them back when the request has ended.
local function hold(bytes)
    local more = bytes - tonumber(ngx.var.held)
    ngx.var.held = bytes
    return ngx.shared.bodies:incr(ngx.var.key_name, more, 0)
end

-- Whether the key holds more than its share, once this request holds so many bytes. A request that
-- is the only one of its key does not: it passes however large bodies may be.
local function exceeds_share(bytes)
    local held = hold(bytes)
    local is_alone = held == bytes
    return held > SHARE_BYTES and not is_alone
end

local function refuse_share()
    refuse(429, "the bodies of the requests of this key take all of its share")
end

---------------------------------------------------------------------------------- the body

-- Waits until a body of unknown length exceeds the key's share, or until its time is over. Returns
-- whether the share is exceeded. Meanwhile it counts `counted` bytes, or what has come if that is
-- more.
local function watch_unknown_body(counted, seconds)
    while seconds > LOOK_S do
        ngx.sleep(LOOK_S)
        seconds = seconds - LOOK_S
        local come = tonumber(ngx.var.request_length) -- with the headers
        if come > counted and exceeds_share(come) then return true end
    end
    ngx.sleep(seconds)
    return false
end

-- Reads the body, and refuses it if that takes too long: nginx itself bounds only the time between
-- two pieces.
local function read_body(announced, counted)
    local is_complete = false
    local is_too_much = false
    local reader = ngx.thread.spawn(function()
        ngx.req.read_body()
        is_complete = true
    end)
    -- A new thread runs until it has to wait. It had not to if the whole body was there already.
    if is_complete then return end
    local clock = ngx.thread.spawn(function()
        local seconds = tonumber(ngx.var.body_seconds)
        if announced then
            ngx.sleep(seconds)
        else
            is_too_much = watch_unknown_body(counted, seconds)
        end
    end)
    ngx.thread.wait(reader, clock) -- for the first of them
    if is_too_much then refuse_share() end
    -- At this status nginx closes the connection, as it does at a time-out of its own.
    if not is_complete then ngx.exit(408) end
    ngx.thread.kill(clock)
end

-- Takes the JSON in pieces. A piece is fine if nothing in it is nested more than MAX_DEPTH deep.
-- What these variables hold goes on from one piece to the next. nginx runs this file anew for each
-- request, so they begin anew, too.
local depth = 0
local is_quoted = false
local is_escaped = false
local function is_flat(piece)
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

local function is_flat_file(file, json_bytes)
    local left = json_bytes
    while left > 0 do
        local piece = file:read(math.min(left, PIECE_BYTES))
        if not piece then return true end
        if not is_flat(piece) then return false end
        left = left - #piece
        ngx.sleep(0) -- other requests are served between two pieces
    end
    return true
end

local function check_body_in_file(name, announced, json_bytes)
    local file = assert(io.open(name, "rb"))
    local is_over = exceeds_share(file:seek("end"))
    -- A body whose length was announced has been counted in full before.
    if is_over and not announced then
        file:close()
        refuse_share()
    end
    file:seek("set")
    local is_fine = is_flat_file(file, json_bytes or math.huge)
    file:close()
    return is_fine
end

local function check_body_in_memory(json_bytes)
    local body = ngx.req.get_body_data() or ""
    return is_flat(body:sub(1, json_bytes or #body))
end

---------------------------------------------------------------------------------- limits of the key

local function read_whole_body()
    local name = ngx.req.get_body_file()
    if not name then return ngx.req.get_body_data() or "" end
    local file = assert(io.open(name, "rb"))
    local body = file:read("*a")
    file:close()
    return body
end

-- Over HTTP the server hands no header on to the model. So what the key may ask for becomes a
-- parameter of the request. The model refuses a request that has the parameter twice.
local function add_limits(limits)
    local body = read_whole_body()
    local _, brace = body:find("^%s*{")
    if not brace then refuse(400, "the request must be a JSON object") end
    local is_empty = body:find("^%s*}", brace + 1)
    local comma = is_empty and "" or ","
    ngx.req.set_body_data('{"jitney-limits":"' .. limits .. '"' .. comma .. body:sub(brace + 1))
end

---------------------------------------------------------------------------------- in this order

refuse_compression()
local is_grpc = path:find("^/inference%.")
if is_grpc or path == "/v1/files" then return end -- their bodies are passed on as they come

local json_bytes = read_json_bytes()
local announced = read_announced_bytes()
local counted = announced or math.min(UNKNOWN_BYTES, read_max_bytes())
if counted > BUFFER_BYTES and exceeds_share(counted) then refuse_share() end
read_body(announced, counted)

local name = ngx.req.get_body_file()
local is_fine
if name then
    is_fine = check_body_in_file(name, announced, json_bytes)
else
    hold(0) -- it stands in nginx's buffer, not in /tmp
    is_fine = check_body_in_memory(json_bytes)
end
if not is_fine then refuse(400, "the JSON is nested more than " .. MAX_DEPTH .. " deep") end

local limits = ngx.var.key_limits
local is_for_language_model = path:find("/generate$") or path:find("/generate_stream$")
if limits ~= "" and is_for_language_model then add_limits(limits) end
