//! A real QEMU with a Linux guest.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use ebb_virtual_host::initramfs::{Archive, add_skeleton};
use ebb_virtual_host::kernel::Kernel;
use ebb_virtual_host::modules::{ModuleIndex, uncompressed_path};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
/// For everything that is waited for.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A QEMU, killed when dropped.
pub struct Machine {
    pub child: Child,
    pub directory: TempDir,
}

impl Machine {
    /// Starts one whose processor does not run yet.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("machines")).unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let kernel = Kernel::find(None).unwrap();
        std::fs::write(directory.path().join("initramfs"), initramfs(&kernel)).unwrap();
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-S"])
            .args(["-accel", "tcg", "-machine", "q35", "-m", "256M"])
            .args(["-device", "virtio-balloon-pci,free-page-reporting=on"])
            .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"])
            .args(["-initrd", &path("initramfs"), "-serial", &format!("file:{}", path("console"))])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", path("machines/guest.qmp"))])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", path("other"))])
            .arg("-kernel")
            .arg(&kernel.image)
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("machines/guest.qmp")
    }

    /// The socket for [`tell`](Self::tell).
    pub fn other(&self) -> PathBuf {
        self.directory.path().join("other")
    }

    /// Sends a request over the other socket, and returns the answer.
    pub fn tell(&self, request: &Value) -> Value {
        let mut stream = UnixStream::connect(self.other()).unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        lines.next().unwrap().unwrap();
        let mut answer = Value::Null;
        for request in [&json!({ "execute": "qmp_capabilities" }), request] {
            stream.write_all(request.to_string().as_bytes()).unwrap();
            answer = loop {
                let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
                if line.get("event").is_none() {
                    break line;
                }
            };
        }
        answer
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The guest's file system: busybox and the modules of the balloon.
pub fn initramfs(kernel: &Kernel) -> Vec<u8> {
    let index = ModuleIndex::read(&kernel.modules).unwrap();
    let mut archive = Archive::new(Vec::new());
    add_skeleton(&mut archive).unwrap();
    archive.copy("bin/busybox", Some(0o755), Path::new("/bin/busybox")).unwrap();
    archive.file("init", 0o755, include_bytes!("../fixtures/qemu/init")).unwrap();
    let mut list = String::new();
    for file in index.load_order(&["virtio_pci", "virtio_balloon"]).unwrap() {
        let name = uncompressed_path(&file).rsplit('/').next().unwrap();
        archive.file(format!("modules/{name}"), 0o644, &index.content(&file).unwrap()).unwrap();
        list += name;
        list += "\n";
    }
    archive.file("modules/list", 0o644, list.as_bytes()).unwrap();
    archive.finish().unwrap()
}
