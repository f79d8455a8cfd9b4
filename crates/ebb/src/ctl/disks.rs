//! Disks: the table, and changes of their sizes.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use ebb_vmm::api::{Client, DiskFormat, DiskInfo, DiskResize, DisksInfo};
use ebb_vmm::size::ByteSize;
use rustix::fs::OFlags;

use super::{Row, bytes, row};

#[derive(Debug, clap::Args)]
pub(super) struct DisksArgs {
    #[command(subcommand)]
    action: Option<DisksAction>,
}

#[derive(Debug, clap::Subcommand)]
enum DisksAction {
    /// Show the disks
    Show,
    /// Give a disk the size of its image, which you have enlarged before (truncate, lvextend), and
    /// notify the guest
    Resize {
        /// The disk: disk0 and further
        #[arg(value_name = "DEVICE")]
        device: String,
        /// New size of an image in the format qcow2, which is enlarged by this; omit it for a raw
        /// image
        #[arg(value_name = "SIZE")]
        size: Option<ByteSize>,
    },
    /// Put another image of the same format in the place of a disk's, at once: the guest must not
    /// use the disk meanwhile. Also: the same image after it has become smaller
    Replace {
        /// The disk: disk0 and further
        #[arg(value_name = "DEVICE")]
        device: String,
        /// The image, which is opened with your rights
        #[arg(value_name = "FILE")]
        image: PathBuf,
    },
}

/// Carries out the command and returns the resulting disks.
pub(super) fn execute(args: DisksArgs, client: &Client) -> anyhow::Result<DisksInfo> {
    match args.action {
        None | Some(DisksAction::Show) => Ok(client.get("/disks")?),
        Some(DisksAction::Resize { device, size }) => {
            let size_bytes = size.map(ByteSize::bytes);
            Ok(client.put_json("/disks", &DiskResize { device, size_bytes, path: None })?)
        }
        Some(DisksAction::Replace { device, image }) => replace(client, device, &image),
    }
}

/// Opens an image as the disk needs it and passes it on.
fn replace(client: &Client, device: String, image: &Path) -> anyhow::Result<DisksInfo> {
    let known: DisksInfo = client.get("/disks")?;
    let readonly = known.disks.iter().any(|disk| disk.device == device && disk.readonly);
    let open = |write: bool| {
        // The other end of a FIFO is not waited for.
        let mut options = File::options();
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        options.read(true).write(write).custom_flags(flags.bits().cast_signed());
        options.open(image).with_context(|| format!("cannot open {}", image.display()))
    };
    let mut files = vec![open(!readonly)?];
    if !readonly {
        files.push(open(false)?);
    }
    let path = Some(std::path::absolute(image)?);
    let change = DiskResize { device, size_bytes: None, path };
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    Ok(client.put_json_with("/disks", &change, &files)?)
}

/// Rows of the table.
pub(super) fn rows(info: &DisksInfo) -> Vec<Row> {
    info.disks.iter().map(|disk| row(&disk.device, describe(disk))).collect()
}

fn describe(disk: &DiskInfo) -> String {
    let format = match disk.format {
        DiskFormat::Raw => "raw",
        DiskFormat::Qcow2 => "qcow2",
    };
    let path = ebb_program::printable(&disk.path.to_string_lossy());
    let size = bytes(disk.size_bytes);
    let readonly = if disk.readonly { ", read-only" } else { "" };
    let direct = if disk.direct { ", direct" } else { "" };
    let requests = &disk.requests;
    let read = bytes(requests.read_bytes);
    let written = bytes(requests.written_bytes);
    let discarded = bytes(requests.discarded_bytes);
    format!(
        "{path}: {size}, {format}{readonly}{direct}; {read} read, {written} written, {discarded} \
         discarded, {} errors",
        requests.errors
    )
}
