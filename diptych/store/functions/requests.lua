#!lua name=diptych_requests__VERSION__
-- The projection of a request. KEYS: 1 its hash, which holds placement, version, owner, record.
--
-- Records of a request are ordered by placement, then by version; a placement has one owner. So an owner that was
-- replaced changes nothing, even if the store forgot the request in between and hears from the old owner first.

-- ARGV: placement, version, owner, ttl in ms, record.
-- Returns {1}, or {0, placement, version} of the newer record that is there.
local function put(keys, argv)
  local found = redis.call('TYPE', keys[1]).ok
  if found ~= 'hash' and found ~= 'none' then redis.call('DEL', keys[1]) end
  local placement, version, owner, record = tonumber(argv[1]), tonumber(argv[2]), argv[3], argv[5]
  local held = redis.call('HMGET', keys[1], 'placement', 'version', 'owner', 'record')
  local held_placement, held_version = tonumber(held[1] or 0) or 0, tonumber(held[2] or 0) or 0
  local again = placement == held_placement and version == held_version and owner == held[3] and record == held[4]
  local newer = placement > held_placement
    or (placement == held_placement and owner == held[3] and version > held_version)
  if not (again or newer) then return {0, held_placement, held_version} end
  redis.call('HSET', keys[1], 'placement', argv[1], 'version', argv[2], 'owner', owner, 'record', record)
  redis.call('PEXPIRE', keys[1], argv[4])
  return {1}
end

-- KEYS: at most 500 records. ARGV: owner, ttl in ms. Returns for each 1: renewed, 0: not there, -1: another's.
local function renew(keys, argv)
  local found = {}
  for i, key in ipairs(keys) do
    local owner = redis.pcall('HGET', key, 'owner')
    if type(owner) ~= 'string' then
      found[i] = 0
    elseif owner ~= argv[1] then
      found[i] = -1
    else
      redis.call('PEXPIRE', key, argv[2])
      found[i] = 1
    end
  end
  return found
end

-- Returns the record, or nil.
local function get(keys)
  local record = redis.pcall('HGET', keys[1], 'record')
  return type(record) == 'string' and record or nil
end

redis.register_function('diptych_requests_put__VERSION__', put)
redis.register_function{
  function_name='diptych_requests_renew__VERSION__', callback=renew, flags={'allow-oom'}}
redis.register_function{function_name='diptych_requests_get__VERSION__', callback=get, flags={'no-writes'}}
