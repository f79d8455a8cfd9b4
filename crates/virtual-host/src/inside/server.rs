//! Serves the control channel: starts programs, transfers files, samples memory.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::channel::{
    Hello, MemorySample, Message, PAYLOAD_LIMIT, PORT_NAME, PROTOCOL_VERSION, Reply, Request,
    read_frame, write_frame,
};
use crate::inside::programs::Programs;
use crate::memory::parse_meminfo;

/// Maximum number of NUMA nodes: Linux's limit on x86-64.
const NODE_LIMIT: u32 = 1024;
/// Time limit for the port to appear after its module was loaded.
const PORT_LIMIT: Duration = Duration::from_secs(20);

/// The channel's sending side, shared by all threads.
#[derive(Debug, Clone)]
pub struct Replies(Arc<Mutex<File>>);

impl Replies {
    /// Sends one reply; errors are only logged, because the reader detects a closed channel.
    pub fn send(&self, id: u64, body: Reply, payload: &[u8]) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = write_frame(&mut *file, &Message { id, body }, payload) {
            eprintln!("ebb init: reply {id}: {error}");
        }
    }

    /// Reports the failure of request `id`.
    pub fn fail(&self, id: u64, error: String) {
        self.send(id, Reply::Failed { error }, &[]);
    }
}

/// A file being received.
struct Incoming {
    file: File,
    part: PathBuf,
    path: PathBuf,
    expected_bytes: u64,
    received_bytes: u64,
}

/// Serves requests until the starter requests a shutdown or closes the channel.
pub fn serve(warnings: Vec<String>) -> io::Result<()> {
    let port = open_port()?;
    let replies = Replies(Arc::new(Mutex::new(port.try_clone()?)));
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        uptime_ms: uptime_ms(),
        warnings,
    };
    replies.send(0, Reply::Hello(hello), &[]);

    let programs = Programs::default();
    let mut incoming: HashMap<u64, Incoming> = HashMap::new();
    let mut reader = BufReader::with_capacity(2 * PAYLOAD_LIMIT, port);
    while let Some((message, payload)) = read_frame::<Request>(&mut reader)? {
        let id = message.id;
        match message.body {
            Request::Run(program) => programs.start(id, &program, &replies),
            Request::Kill => programs.kill(id),
            Request::PutFile { path, mode, size_bytes } => {
                match Incoming::create(&path, mode, size_bytes) {
                    Ok(file) => {
                        incoming.insert(id, file);
                        receive(&mut incoming, id, &[], &replies);
                    }
                    Err(error) => replies.fail(id, format!("cannot write {path}: {error}")),
                }
            }
            Request::FileData => receive(&mut incoming, id, &payload, &replies),
            Request::GetFile { path } => send_file(id, path, replies.clone()),
            Request::Sample => replies.send(id, Reply::Sample(sample()), &[]),
            Request::Shutdown => break,
        }
    }
    Ok(())
}

impl Incoming {
    fn create(path: &str, mode: u32, expected_bytes: u64) -> io::Result<Self> {
        let path = PathBuf::from(path);
        let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        fs::create_dir_all(parent)?;
        let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(".part");
        let part = parent.join(name);
        let file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&part)?;
        Ok(Self { file, part, path, expected_bytes, received_bytes: 0 })
    }

    fn write(&mut self, data: &[u8]) -> io::Result<()> {
        self.received_bytes += data.len() as u64;
        if self.received_bytes > self.expected_bytes {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "received more than announced"));
        }
        self.file.write_all(data)?;
        if self.received_bytes == self.expected_bytes {
            fs::rename(&self.part, &self.path)?;
        }
        Ok(())
    }
}

/// Appends data to a file being received; data for a failed file are dropped.
fn receive(incoming: &mut HashMap<u64, Incoming>, id: u64, data: &[u8], replies: &Replies) {
    let Some(file) = incoming.get_mut(&id) else { return };
    match file.write(data) {
        Ok(()) if file.received_bytes < file.expected_bytes => return,
        Ok(()) => replies.send(id, Reply::FileDone { size_bytes: file.received_bytes }, &[]),
        Err(error) => {
            let _ = fs::remove_file(&file.part);
            replies.fail(id, format!("cannot write {}: {error}", file.path.display()));
        }
    }
    incoming.remove(&id);
}

/// Sends a file from a separate thread, so that other requests are served meanwhile.
fn send_file(id: u64, path: String, replies: Replies) {
    thread::spawn(move || {
        let result = (|| -> io::Result<u64> {
            let mut file = File::open(&path)?;
            let metadata = file.metadata()?;
            if metadata.is_dir() {
                return Err(io::ErrorKind::IsADirectory.into());
            }
            let start =
                Reply::FileStart { mode: metadata.mode() & 0o7777, size_bytes: metadata.len() };
            replies.send(id, start, &[]);
            let mut buffer = vec![0; PAYLOAD_LIMIT];
            let mut sent = 0;
            // Files of /proc and /sys report no length: the content read counts.
            loop {
                let length = file.read(&mut buffer)?;
                if length == 0 {
                    return Ok(sent);
                }
                replies.send(id, Reply::FileData, &buffer[..length]);
                sent += length as u64;
            }
        })();
        match result {
            Ok(size_bytes) => replies.send(id, Reply::FileDone { size_bytes }, &[]),
            Err(error) => replies.fail(id, format!("cannot read {path}: {error}")),
        }
    });
}

fn open_port() -> io::Result<File> {
    let deadline = Instant::now() + PORT_LIMIT;
    loop {
        if let Some(device) = find_port(Path::new("/sys/class/virtio-ports"))
            && let Ok(port) = OpenOptions::new().read(true).write(true).open(&device)
        {
            return Ok(port);
        }
        if Instant::now() > deadline {
            let text = format!("no virtio-serial port {PORT_NAME} appeared");
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn find_port(class: &Path) -> Option<PathBuf> {
    fs::read_dir(class).ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim() == PORT_NAME).then(|| Path::new("/dev").join(entry.file_name()))
    })
}

fn uptime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

fn sample() -> MemorySample {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let counter = |text: &str, name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0)
    };
    let vmstat = read("/proc/vmstat");
    let nodes = (0..NODE_LIMIT)
        .map(|node| format!("/sys/devices/system/node/node{node}/meminfo"))
        .take_while(|path| Path::new(path).exists())
        .map(|path| parse_meminfo(&read(&path)))
        .collect();
    MemorySample {
        uptime_ms: uptime_ms(),
        meminfo: parse_meminfo(&read("/proc/meminfo")),
        swapped_in_pages: counter(&vmstat, "pswpin "),
        swapped_out_pages: counter(&vmstat, "pswpout "),
        nodes,
    }
}
