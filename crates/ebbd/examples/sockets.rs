//! What the daemon costs with many machines: their monitors are servers of this program that answer
//! as Ebb's do.
//!
//!     cargo build --release -p ebbd && cargo run --release -p ebbd --example sockets -- 1000

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ebbd::monitors::process::Process;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::sleep;

const VM: &str = r#"{"state":"running","memory_bytes":536870912}"#;
const BALLOON: &str = r#"{"target_bytes":0,"actual_bytes":0,"state":"idle",
    "negotiated_features":["statistics","page_reporting"]}"#;
const STATISTICS: &str = r#"{"age_ms":100,"statistics":{"total_memory_bytes":500000000,
    "available_memory_bytes":400000000,"free_memory_bytes":300000000}}"#;
/// Time for all to be found, and time that is measured.
const SETTLE: Duration = Duration::from_secs(10);
const MEASURE: Duration = Duration::from_secs(20);

/// Answers the requests of one client.
async fn serve(mut client: UnixStream) {
    let mut input = vec![0; 4096];
    while let Ok(length @ 1..) = client.read(&mut input).await {
        let request = String::from_utf8_lossy(&input[..length]);
        let body = match request.split(' ').nth(1).unwrap_or_default() {
            "/vm" => VM,
            "/balloon" => BALLOON,
            _ => STATISTICS,
        };
        let length = body.len();
        let head = format!("HTTP/1.1 200 OK\r\nServer: ebb/0\r\nContent-Length: {length}\r\n\r\n");
        if client.write_all((head + body).as_bytes()).await.is_err() {
            return;
        }
    }
}

fn listen(path: &Path) -> std::io::Result<()> {
    let listener = UnixListener::bind(path)?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(serve(client));
        }
    });
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let count: usize = std::env::args().nth(1).map_or(Ok(1000), |word| word.parse())?;
    let directory = std::env::temp_dir().join(format!("ebbd-sockets-{}", std::process::id()));
    let machines = directory.join("machines");
    fs::create_dir_all(&machines)?;
    for number in 0..count {
        listen(&machines.join(format!("m{number}.sock")))?;
    }
    let config = directory.join("ebbd.toml");
    fs::write(&config, format!("machines = [\"{}\"]\n", machines.display()))?;
    let beside: PathBuf =
        std::env::current_exe()?.ancestors().skip(2).collect::<Vec<_>>()[0].into();
    let mut daemon = Command::new(beside.join("ebbd"))
        .arg("--config")
        .arg(&config)
        .arg("--state")
        .arg(directory.join("state"))
        .arg("--socket")
        .arg(directory.join("ebbd.sock"))
        .spawn()?;
    sleep(SETTLE).await;
    let process = Process::of(daemon.id())?;
    let before = process.usage()?;
    sleep(MEASURE).await;
    let after = process.usage()?;
    daemon.kill()?;
    daemon.wait()?;
    fs::remove_dir_all(&directory)?;
    let ran_ms = after.processor_ms - before.processor_ms;
    let percent = 100.0 * ran_ms as f64 / MEASURE.as_millis() as f64;
    println!(
        "{count} machines: {percent:.1} % of a processor, {} MiB resident",
        after.resident_bytes >> 20
    );
    Ok(())
}
